"""Each feature of the catalog has the outcome that the table in the docs promises."""

import pytest
from lightning.pytorch import callbacks, profilers

from tests.features.catalog import FEATURES, find
from tests.features.check import check
from tests.features.feature import Feature
from tests.features.table import PAGE, page
from tests.harness.pool import Pool
from tests.harness.thorough import covered

CASES = [(feature, layout) for feature in FEATURES for layout in feature.outcomes]
DEFAULT = [
    (find("`validate`, `test` and `predict` after `fit`"), "P = 2"),
    (find("`fast_dev_run=True`"), "P = 2"),
]


def _name(value: Feature | str) -> str:
    return value if isinstance(value, str) else value.name.replace("`", "")


@pytest.mark.parametrize(("feature", "layout"), covered(CASES, by=DEFAULT), ids=_name)
def test_feature(pool: Pool, feature: Feature, layout: str) -> None:
    check(pool, feature, layout)


def test_names_are_unique() -> None:
    assert len({feature.name for feature in FEATURES}) == len(FEATURES)


def test_each_callback_and_profiler_of_lightning_has_a_row() -> None:
    abstract = {"Callback", "Checkpoint", "ProgressBar", "Profiler"}
    rows = " ".join(feature.name for feature in FEATURES)
    missing = [name for kind in (callbacks, profilers) for name in kind.__all__ if name not in rows]
    assert set(missing) <= abstract, missing


def test_the_page_shows_the_catalog() -> None:
    written = PAGE.read_text(encoding="utf-8")
    (made,) = [line for line in written.splitlines() if line.startswith("Run on ")]
    assert written == page(made), "run python -m tests.features.table"

"""Tries a feature on a layout and in one process, and asserts that it has the outcome that the table promises."""

import re
import tempfile

from tests.features.catalog import find
from tests.features.compare import differing, merged
from tests.features.feature import LAYOUTS, AsDDP, Differs, Feature, RefusedByLightning
from tests.features.trial import Records, run_trial
from tests.habits.habit import Refused, assert_refused
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout


def check(pool: Pool, feature: Feature, layout_name: str) -> None:
    """Try the feature on a layout, and assert its outcome."""
    layout, wanted = LAYOUTS[layout_name], feature.outcomes[layout_name]
    try:
        actual = attempt(pool, feature, layout, "hanayo")
    except RunFailed as failed:
        if isinstance(wanted, RefusedByLightning):
            assert re.search(wanted.message, failed.first.message), failed.first
            return
        assert isinstance(wanted, Refused), f"should be {wanted}: {failed.first}"
        assert_refused(failed, wanted)
        return
    assert not isinstance(wanted, Refused | RefusedByLightning), "should be refused, but no rank raised an error"
    found = differing(actual, attempt(pool, feature, Layout(), "auto"), wanted.bound)
    if isinstance(wanted, Differs):
        assert sorted(found) == sorted(wanted.records), found
        return
    if isinstance(wanted, AsDDP):
        assert found, "is equal to one process, which the table should say"
        found = differing(actual, attempt(pool, feature, Layout(data=layout.data), "ddp"), wanted.bound)
    assert not found, found


def attempt(pool: Pool, feature: Feature, layout: Layout, strategy: str) -> Records:
    """What the feature leaves on a layout, merged over all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        world_size = layout.world_size
        ranks = pool.run(world_size, run_trial, find, feature.name, layout, strategy, folder, timeout=30.0)
    return merged(ranks, layout)

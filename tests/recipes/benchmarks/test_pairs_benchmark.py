"""The benchmark of pairs: its schedules, its prediction, and its page."""

import json
from pathlib import Path

import pytest

from lightning_hanayo.schedule import Kind
from lightning_hanayo.schedule.cost import run_alone
from lightning_hanayo.schedule.passes.validation import validate
from recipes.benchmarks.cluster import Link
from recipes.benchmarks.pairs.__main__ import Outcome, Result, table
from recipes.benchmarks.pairs.tables import ALONE, STEADY, WAYS, table_of
from recipes.benchmarks.schemes.log import replay, segments_of
from recipes.benchmarks.schemes.names import ONE_D, three_d
from recipes.benchmarks.tensor3d_rank import Case, dry_run

LINK = Link(200.0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_schedules_can_run(way: str, count: int) -> None:
    schedule = table_of(way, count)
    validate(schedule)
    assert len(schedule.pairs) == {ALONE: 0, STEADY: count - 1}[way]
    assert {(first.kind, second.kind) for first, second in schedule.pairs} <= {(Kind.F, Kind.B)}


@pytest.mark.parametrize("name", [ONE_D[0], three_d((2, 2, 2)), three_d((2, 2, 2), 4), three_d((8, 1, 1))])
def test_a_dry_run_says_what_its_forward_and_its_backward_take(name: str) -> None:
    """Sums of weights' gradients at the backward's end aren't waited for; the forward is the whole log's."""
    case = Case("", 8, 512, 64, (), 1e9)
    events, rate = dry_run(case, name), LINK.bytes_per_second / 4
    whole = replay(events, rate)
    forward, backward = segments_of(events, rate)
    assert run_alone(forward) == pytest.approx(whole.forward)
    assert 0.7 * whole.step <= run_alone(forward) + run_alone(backward) <= whole.step + 1e-9
    assert sum(one.compute for one in (*forward, *backward)) == pytest.approx(whole.computing)
    assert sum(one.start or 0 for one in (*forward, *backward)) == pytest.approx(whole.receiving)


def test_what_a_further_micro_batch_adds() -> None:
    alone = Result("1-d", ALONE, False, 1.0, {2: 3.0, 4: 6.0}, {})
    paired = Result("cube", STEADY, True, 0.5, {2: 1.5, 4: 2.5}, {2: 1.4, 4: 2.4})
    assert (alone.steady, paired.steady, paired.multiple(4)) == (1.5, 1.0, 1.25)
    lines = table([Outcome("M = 8h", 384, (alone, paired))], ["machine"]).splitlines()
    assert lines[-1] == "| cube | F+B | yes | 1.50 | 1.25 | 1.000 | 1.04 to 1.07 | 3.00 | 1.00 |"


def by_count(plain: dict[str, float]) -> dict[int, float]:
    return {int(count): seconds for count, seconds in plain.items()}


def test_the_page_says_what_was_measured() -> None:
    folder = Path(__file__).parents[3] / "docs" / "benchmarks"
    data = json.loads((folder / "pairs.json").read_text())
    outcomes = [
        Outcome(
            one["title"],
            one["hidden"],
            tuple(
                Result(**result | {key: by_count(result[key]) for key in ("steps", "predicted")})
                for result in one["results"]
            ),
        )
        for one in data["cases"]
    ]
    assert (folder / "pairs-tables.md").read_text().startswith(table(outcomes, data["about"]))

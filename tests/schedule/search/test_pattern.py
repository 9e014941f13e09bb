"""The pattern: its drawing, pauses and memory, and that others can follow it every period."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.schedule import CostModel, Schedule, simulate
from lightning_hanayo.schedule.search.evaluator import Evaluator, SchedulingProblem
from lightning_hanayo.schedule.search.search import Pattern, Pauses
from lightning_hanayo.schedule.table import zigzag
from tests.schedule.samples import unhurried

few = st.integers(0, 3)
placements = st.builds(zigzag, st.integers(1, 4), st.integers(1, 3))
all_pauses = st.builds(Pauses, few, few, few, few, few, few, few)
V = (0, 1, 1, 0)


def drawn(pattern: Pattern, stage_ranks: tuple[int, ...]) -> list[str]:
    """A line per rank: what micro-batch 0 runs in each cell."""
    cells = {
        (stage_ranks[stage], cell): f"{kind}{stage}"
        for kind, row in zip("FIW", pattern.cells, strict=False)
        for stage, cell in enumerate(row)
    }
    last = max(cell for _, cell in cells)
    return [" ".join(cells.get((rank, cell), "..") for cell in range(last + 1)) for rank in range(max(stage_ranks) + 1)]


def test_the_picture() -> None:
    pattern = Pattern(V, Pauses())
    assert drawn(pattern, V) == [
        "F0 .. .. F3 I3 W3 .. I0 W0 .. ..",
        ".. F1 F2 .. .. I2 I1 .. .. W2 W1",
    ]
    assert (pattern.period, pattern.latency, pattern.peak) == (6, 8, 4)


def test_pauses() -> None:
    """1 after a message down, 2 up (back: the same), none at a turning point, 1 before I, 2 before W.

    W1 finds cells 14 and 15 taken by F1 and F2 of the next micro-batch.
    """
    pattern = Pattern(V, Pauses(1, 2, 1, 2, turn=1, weights=2, period=6))
    assert drawn(pattern, V) == [
        "F0 .. .. .. .. .. F3 .. I3 .. .. W3 .. .. I0 .. .. W0",
        ".. .. F1 F2 .. .. .. .. .. .. I2 I1 .. W2 .. .. W1 ..",
    ]
    assert (pattern.period, pattern.latency) == (12, 15)


@given(placements, all_pauses)
@unhurried
def test_each_action_comes_after_what_it_waits_for(stage_ranks: tuple[int, ...], pauses: Pauses) -> None:
    pattern = Pattern(stage_ranks, pauses)
    way = [*pattern.forward, *pattern.backward[::-1]]
    assert way == sorted(set(way))
    assert pattern.backward[-1] > pattern.forward[-1] + pauses.turn
    for backward, weight in zip(pattern.backward, pattern.weights, strict=True):
        assert weight > backward + pauses.weights


@given(placements, all_pauses)
@unhurried
def test_no_two_micro_batches_collide_on_a_rank(stage_ranks: tuple[int, ...], pauses: Pauses) -> None:
    pattern = Pattern(stage_ranks, pauses)
    for rank in range(max(stage_ranks) + 1):
        mine = [row[stage] for row in pattern.cells[:3] for stage, of in enumerate(stage_ranks) if of == rank]
        assert len({cell % pattern.period for cell in mine}) == len(mine) == pattern.period - pauses.period


@given(placements, all_pauses)
@unhurried
def test_the_peak_is_that_of_the_steady_state(stage_ranks: tuple[int, ...], pauses: Pauses) -> None:
    pattern = Pattern(stage_ranks, pauses)
    count = 2 + max(pattern.weights) // pattern.period
    held = {
        (rank, cell): sum(
            begin <= cell - microbatch * pattern.period <= end
            for of, begin, end in zip(stage_ranks, pattern.forward, pattern.weights, strict=True)
            for microbatch in range(count)
            if of == rank
        )
        for rank in range(max(stage_ranks) + 1)
        for cell in range(count * pattern.period)
    }
    assert pattern.peak == max(held.values())


@given(placements, all_pauses, st.integers(1, 6))
@unhurried
def test_a_schedule_that_follows_the_pattern_keeps_its_cells_and_its_peak(
    stage_ranks: tuple[int, ...], pauses: Pauses, num_microbatches: int
) -> None:
    """With costs such that each action takes one cell."""
    pattern = Pattern(stage_ranks, pauses)
    stages_per_rank = stage_ranks.count(0)
    costs = CostModel(stages_per_rank, stages_per_rank, stages_per_rank)
    shape = Schedule("pattern", stage_ranks, ((),) * (max(stage_ranks) + 1), num_microbatches)
    problem, evaluator = SchedulingProblem.of(shape, costs, num_microbatches), Evaluator(shape, costs)
    rows = problem.rows(pattern.keys(num_microbatches, weights=True))
    timeline = simulate(Schedule("pattern", stage_ranks, evaluator.decode(rows), num_microbatches), costs)
    kinds = dict(zip("FIW", pattern.cells, strict=False))
    for span in timeline.spans:
        action = span.action
        assert action.microbatch is not None
        assert span.start <= kinds[action.kind][action.stage] + action.microbatch * pattern.period + 1e-9
    assert max(timeline.peak_activations) * stages_per_rank <= pattern.peak + 1e-6


def test_keys_are_cells_by_code() -> None:
    pattern = Pattern((0, 0), Pauses())
    assert pattern.cells == ((0, 1), (3, 2), (5, 4), (6,))
    assert pattern.keys(2, weights=False) == [0, 6, 1, 7, 3, 9, 2, 8]
    assert pattern.keys(2, weights=True) == [0, 6, 1, 7, 3, 9, 2, 8, 5, 11, 4, 10]

"""The building block, repeated and compacted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.schedule import simulate, validate
from lightning_hanayo.schedule.builders.v_schedules import PERIOD, Cells, repeat
from lightning_hanayo.schedule.registry import Request
from tests.schedule.drawing import drawn
from tests.schedule.samples import unhurried

V = ((0, 3, 4, 7), (1, 2, 5, 6))
"""rank 0   F0 .  .  F1 I1 .  .  I0
rank 1   .  F0 F1 .  .  I1 I0"""


def test_the_picture() -> None:
    assert all(len({cell % PERIOD for cell in cells}) == 4 for cells in V)
    schedule = repeat(Request("v", 2, 2), V, capacity=2, eager=False)
    validate(schedule)
    assert schedule.stage_ranks == (0, 1, 1, 0)
    assert drawn(schedule) == [
        "F00 F01 ... F10 I10 W10 F11 I00 I11 W00 W11 I01 W01",
        "... F00 F10 F01 F11 I10 I00 W10 W00 I11 I01 W11 W01",
    ]


@pytest.mark.parametrize("eager", [False, True])
def test_a_forward_without_memory_waits_for_a_weight_gradient(eager: bool) -> None:
    schedule = repeat(Request("v", 1, 2), ((0, 1, 2, 3),), capacity=1, eager=eager)
    assert drawn(schedule) == ["F00 F10 I10 I00 W10 F01 W00 F11 I11 I01 W11 W01"]
    assert max(simulate(schedule).peak_activations) == 1


def stretched(num_ranks: int, slopes: tuple[int, int, int, int], pauses: tuple[int, int, int]) -> list[Cells]:
    """A V with the given numbers of cells per rank down and up, and between the two."""
    last = num_ranks - 1
    turn = 1 + last * slopes[0] + pauses[0]
    back = turn + 1 + last * slopes[1] + pauses[1]
    home = back + 1 + last * slopes[2] + pauses[2]
    return [
        (r * slopes[0], turn + (last - r) * slopes[1], back + r * slopes[2], home + (last - r) * slopes[3])
        for r in range(num_ranks)
    ]


def needs(cells: Cells) -> int:
    """The most stages a rank holds while the block repeats, if each W is in the cell of its I."""
    times = [(start + PERIOD * m, held) for m in range(40) for start, held in zip(cells, (1, 1, -1, -1), strict=True)]
    held = peak = 0
    for _, change in sorted(times, key=lambda one: (one[0], -one[1])):
        held += change
        peak = max(peak, held)
    return peak


@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.tuples(*[st.integers(1, 3)] * 4),
    st.tuples(*[st.integers(0, 4)] * 3),
    st.booleans(),
)
@unhurried
def test_any_block_is_valid_and_keeps_to_its_capacity(
    num_ranks: int,
    num_microbatches: int,
    slopes: tuple[int, int, int, int],
    pauses: tuple[int, int, int],
    eager: bool,
) -> None:
    block = stretched(num_ranks, slopes, pauses)
    capacity = -(-max(map(needs, block)) // 2)
    schedule = repeat(Request("v", num_ranks, num_microbatches), block, capacity, eager=eager)
    validate(schedule)
    timeline = simulate(schedule)
    peak = max(timeline.peak_activations)
    assert peak <= capacity
    # rank P-1 waits for all forwards and P-1 input gradients, and has no more than its peak of forwards to do meanwhile
    assert timeline.makespan - 3 * num_microbatches >= num_ranks - peak + (num_ranks - 1) / 2 - 1e-9

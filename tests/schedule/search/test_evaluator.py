"""The evaluator: tables as codes, and their times."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.schedule import Action, CostModel, Schedule, build
from lightning_hanayo.schedule.search.evaluator import Evaluator
from tests.schedule.message_rule import executable_order, table_waits
from tests.schedule.samples import LINK, schedules, split, table, unhurried

COSTS = CostModel(forward=1.0, backward_input=1.25, backward_weight=0.75, message=0.125)


def test_the_codes_of_two_stages_and_three_micro_batches() -> None:
    r"""The drawing of the module:

    0F0 0F1 0F2 | 1F0 1F1 1F2 | 0I0 0I1 0I2 | 1I0 1I1 1I2 | 0W0 ...
     0   1   2     3   4   5     6   7   8     9  10  11    12
    """
    evaluator = Evaluator(table("", "", stage_ranks=(0, 1), num_microbatches=3), COSTS)
    cells = ["0F0", "0F2", "1F1", "0I0", "1I2", "0W0", "0B0", "1B2"]
    codes = [evaluator.code(Action.parse(cell)) for cell in cells]
    assert codes == [0, 2, 4, 6, 11, 12, 18, 23]
    assert [str(evaluator.action(code)) for code in codes] == cells


@given(schedules(pairs=False), st.floats(1e-9, 1) | st.just(0.0))
@unhurried
def test_each_action_starts_when_its_rank_is_free_and_its_inputs_have_arrived(
    schedule: Schedule, message: float
) -> None:
    """Compared with the dependency rule, applied to actions."""
    costs = CostModel(forward=1.0, backward_input=1.25, backward_weight=0.75, message=message)
    waits = table_waits(schedule)
    rank_of, free, ends = schedule.stage_ranks, [0.0] * schedule.num_ranks, dict[Action, float]()
    for action in executable_order(schedule.actions, waits):
        rank = rank_of[action.stage]
        arrivals = [ends[other] + (message if rank_of[other.stage] != rank else 0.0) for other in waits[action]]
        ends[action] = free[rank] = max([free[rank], *arrivals]) + costs.of(schedule, action)
    evaluator = Evaluator(schedule, costs)
    played = evaluator.run(evaluator.encode(schedule.actions))
    assert played is not None
    assert played.ends == [[ends[action] for action in row] for row in schedule.actions]
    assert played.last == free
    assert played.makespan == max(free)


@given(schedules(), st.floats(1e-9, 1))
@unhurried
def test_a_pair_starts_when_the_inputs_of_both_have_arrived(schedule: Schedule, message: float) -> None:
    costs = CostModel(forward=1.0, backward_input=1.25, backward_weight=0.75, message=message, segments=LINK)
    waits = table_waits(schedule)
    rank_of, first_of = schedule.stage_ranks, {second: first for first, second in schedule.pairs}
    evaluator = Evaluator(schedule, costs)
    ran = evaluator.run(evaluator.encode(schedule.actions))
    assert ran is not None
    starts, ends = (
        {action: time for row, times in zip(schedule.actions, all_times, strict=True)
         for action, time in zip(row, times, strict=True)} for all_times in (ran.starts, ran.ends)
    )  # fmt: skip
    for row in schedule.actions:
        free = 0.0
        for action in row:
            if action in first_of:
                continue
            cell = [action, *([schedule.partner_of[action]] if action in schedule.partner_of else [])]
            arrivals = [
                ends[other] + (message if rank_of[other.stage] != rank_of[action.stage] else 0.0)
                for one in cell for other in waits[one]
            ]  # fmt: skip
            takes = costs.pair(schedule, cell[0], cell[1]) if len(cell) == 2 else [costs.of(schedule, action)]
            assert [starts[one] for one in cell] == pytest.approx([max([free, *arrivals])] * len(cell))
            assert [ends[one] - starts[one] for one in cell] == pytest.approx(list(takes))
            free = max(ends[one] for one in cell)


def test_whole_and_split_backwards_in_one_table() -> None:
    r"""rank 0   0F0 0F1 .   .   .   0B0 0I1 0W1      micro-batch 0: stage 1 in two pieces, stage 0 in one
    rank 1       1F0 1I0 1F1 1B1 1W0              1: the other way round
    """
    schedule = table(
        "0F0 0F1 0B0 0I1 0W1", "1F0 1I0 1F1 1B1 1W0", stage_ranks=(0, 1), num_microbatches=2
    )  # fmt: skip
    evaluator = Evaluator(schedule, CostModel())
    played = evaluator.run(evaluator.encode(schedule.actions))
    assert played is not None
    assert played.starts == [[0, 1, 3, 6, 7], [1, 2, 3, 4, 6]]


def test_a_rank_may_begin_later() -> None:
    schedule = build("gpipe", num_ranks=2, num_microbatches=1)
    evaluator = Evaluator(schedule, CostModel(message=0.5))
    played = evaluator.run(evaluator.encode(schedule.actions), begin=[2.0, 5.0])
    assert played is not None
    assert played.starts == [[2, 8.5], [5, 6]]
    assert played.last == [10.5, 8]


@pytest.mark.parametrize("rows", [("0B0 0F0", "1F0 1B0"), ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")])
def test_ranks_that_deadlock_have_no_makespan(rows: tuple[str, ...]) -> None:
    schedule = table(*rows, stage_ranks=(0, 1), num_microbatches=2)
    evaluator = Evaluator(schedule, COSTS)
    assert evaluator.run(evaluator.encode(schedule.actions)) is None
    assert evaluator.makespan(evaluator.encode(schedule.actions)) == inf


def test_many_tables_of_one_shape() -> None:
    shape = build("1f1b", num_ranks=4, num_microbatches=8)
    evaluator = Evaluator(shape, CostModel())
    whole, cut = (evaluator.makespan(evaluator.encode(one.actions)) for one in (shape, split(shape)))
    assert whole == (4 - 1 + 8) * 3
    assert cut < whole

"""The loss-stage pass: adds a stage with head and loss on rank 0 to a schedule that ends on another rank.

1f1b, P = 2     rank 0   0F0 0F1     2F0 2B0   .   0B0 ...      2 = head and loss, which `training_step` computes
                rank 1       1F0     1F1     1B0 ...
"""

from dataclasses import replace
from itertools import chain

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.passes.subset import AnyTable
from lightning_hanayo.schedule.search.evaluator import Evaluator


def with_loss_stage(schedule: AnyTable) -> AnyTable:
    """The schedule with one more stage on rank 0 that holds head and loss, unless it begins and ends there already.

    The loss's `F` and `B` (which take no time, and which others wait for) are placed where they become ready while the
    schedule runs with T_F = 1, T_B = 2, before what rank 0 would start next. That is the order of a possible run, so it
    can't deadlock.
    """
    if schedule.stage_ranks[0] == schedule.stage_ranks[-1] == 0 and schedule.num_stages > 1:
        return schedule
    extended = replace(schedule, stage_ranks=(*schedule.stage_ranks, 0), loss_stage=True)
    trains = any(action.kind is not Kind.F for row in schedule.actions for action in row)
    kinds = (Kind.F, Kind.B) if trains else (Kind.F,)
    losses = [[Action(schedule.num_stages, kind, m) for kind in kinds] for m in range(schedule.num_microbatches)]
    rows = [*losses, *schedule.actions]  # as if each micro-batch's losses had a rank of their own
    evaluator = Evaluator(extended, CostModel())
    times = evaluator.run(evaluator.encode(rows), [0.0] * len(rows))
    assert times is not None, "a valid schedule can't deadlock"
    start = dict(zip(chain(*rows), chain(*times.starts), strict=True))
    # In a tie the loss goes first (it is first in the list, the sort is stable): what waits for it can't start earlier
    first = sorted([*chain(*losses), *schedule.actions[0]], key=start.__getitem__)
    return replace(extended, actions=(tuple(first), *schedule.actions[1:]))

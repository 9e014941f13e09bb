"""The loss stage: one more stage on rank 0, for schedules that end elsewhere.

1f1b, P = 2     rank 0   0F0 0F1     2F0 2B0   .   0B0 ...      2 = head and loss, where `training_step` lives
                rank 1       1F0     1F1     1B0 ...
"""

from collections.abc import Mapping
from dataclasses import replace

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.dependency import play, waits_in
from lightning_hanayo.schedule.table import Schedule


def with_loss_stage(schedule: Schedule) -> Schedule:
    """The schedule with one more stage on rank 0 that holds head and loss, unless it begins and ends there already.

    The loss's `F` and `B` (no time, and everyone waits for them) stand where they become ready while the schedule runs
    with T_F = 1, T_B = 2, ahead of what rank 0 would start next. That is the order of one possible run: no deadlock.

    Raises:
        HanayoError: the model is there twice, so that the losses lie on two ranks.
    """
    if schedule.replica_of:
        ends = schedule.stage_ranks[schedule.chain_length - 1], schedule.stage_ranks[-1]
        raise HanayoError(
            f"schedule {schedule.name!r} has its losses on two ranks, {ends[0]} and {ends[1]}; a loss stage on rank 0 "
            "can't hold them. Play it on stages that compute their own loss, or choose another schedule ('hanayo')"
        )
    if schedule.stage_ranks[0] == schedule.stage_ranks[-1] == 0 and schedule.num_stages > 1:
        return schedule
    extended = replace(schedule, stage_ranks=(*schedule.stage_ranks, 0), loss_stage=True)
    trains = any(action.kind is not Kind.F for row in schedule.actions for action in row)
    kinds = (Kind.F, Kind.B) if trains else (Kind.F,)
    losses = [[Action(schedule.num_stages, kind, m) for kind in kinds] for m in range(schedule.num_microbatches)]
    start = _starts(extended, losses)
    # Ties go to the loss (it stands first, the sort is stable): who waits for it starts no earlier, who feeds it does
    first = sorted([*(action for row in losses for action in row), *schedule.actions[0]], key=start.__getitem__)
    return replace(extended, actions=(tuple(first), *schedule.actions[1:]))


def _starts(schedule: Schedule, losses: list[list[Action]]) -> Mapping[Action, float]:
    """When every action starts if the losses, one list per micro-batch, keep no rank busy."""
    lists = [*schedule.actions, *losses]
    waits = waits_in(lists, schedule.num_stages, schedule.num_microbatches)
    costs = CostModel()
    free = [0.0] * schedule.num_ranks
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    for action in play(lists, waits):
        ready = max((ends[other] for other in waits[action]), default=0.0)
        if action.stage == schedule.num_stages - 1:
            starts[action] = ends[action] = ready
        else:
            rank = schedule.stage_ranks[action.stage]
            starts[action] = max(ready, free[rank])
            free[rank] = ends[action] = starts[action] + costs.of(schedule, action)
    return starts

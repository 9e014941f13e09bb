"""The loss stage: one more stage on rank 0 for schedules that end elsewhere, and the forward-only schedule.

1f1b, P = 2     rank 0   0F0 0F1 2F0 2B0 .   ...        2 = head and loss, where `training_step` lives
                rank 1       1F0 1F1     1B0 ...
"""

import heapq
from collections import defaultdict
from dataclasses import replace

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.dependency import waits_in
from lightning_hanayo.schedule.table import Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """The same schedule without its backwards, for validation and prediction."""
    rows = tuple(tuple(action for action in row if action.kind is Kind.F) for row in schedule.actions)
    return replace(schedule, actions=rows)


def with_loss_stage(schedule: Schedule, costs: CostModel | None = None) -> Schedule:
    """The schedule with one more stage on rank 0 that holds head and loss, unless it begins and ends there already.

    The loss's `F` and `B` are placed where they become ready while the schedule runs (an event simulation under `costs`,
    default T_F = 1, T_B = 2), before anything else rank 0 could start then: they take no time and everyone waits for them.
    The new order is that of one possible run, so it can't deadlock.
    """
    if schedule.stage_ranks[0] == schedule.stage_ranks[-1] == 0 and schedule.num_stages > 1:
        return schedule
    loss = schedule.num_stages
    extended = replace(schedule, stage_ranks=(*schedule.stage_ranks, 0), loss_stage=True)
    backward = any(action.kind is not Kind.F for row in schedule.actions for action in row)
    kinds = (Kind.F, Kind.B) if backward else (Kind.F,)
    extra = [Action(loss, kind, m) for m in range(schedule.num_microbatches) for kind in kinds]
    first = _played(extended, extra, costs or CostModel())
    return replace(extended, actions=(first, *schedule.actions[1:]))


def _played(schedule: Schedule, extra: list[Action], costs: CostModel) -> tuple[Action, ...]:
    """Rank 0's actions in the order in which they start, the `extra` ones as soon as they are ready."""
    rows = schedule.actions
    waits = waits_in([*rows, extra], schedule.num_stages, schedule.num_microbatches)
    missing = {action: len(others) for action, others in waits.items()}
    wakes: dict[Action, list[Action]] = defaultdict(list)
    for action, others in waits.items():
        for other in others:
            wakes[other].append(action)
    loss = schedule.num_stages - 1
    place, busy = [0] * len(rows), [False] * len(rows)
    ready: list[Action] = []
    started: list[Action] = []
    ends: list[tuple[float, int, int, Action | None]] = [(0.0, 0, rank, None) for rank in range(len(rows))]
    count = 0
    while ends:
        now = ends[0][0]
        while ends and ends[0][0] == now:
            _, _, rank, action = heapq.heappop(ends)
            busy[rank] = False
            for other in wakes.pop(action, ()) if action else ():
                missing[other] -= 1
                if missing[other] == 0 and other.stage == loss:
                    ready.append(other)
        for rank, row in enumerate(rows):
            if busy[rank]:
                continue
            if rank == 0 and ready:
                action = min(ready, key=lambda one: (one.microbatch, one.kind))
                ready.remove(action)
            elif place[rank] < len(row) and missing[row[place[rank]]] == 0:
                action = row[place[rank]]
                place[rank] += 1
            else:
                continue
            if rank == 0:
                started.append(action)
            busy[rank] = True
            count += 1
            heapq.heappush(ends, (now + costs.of(schedule, action), count, rank, action))
    return tuple(started)

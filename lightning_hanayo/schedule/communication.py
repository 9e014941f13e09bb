"""The communication pass: adds sends, receives and gradient reductions to a compute-only table.

A send comes right after the action that makes its message. Its receive is posted at the same moment of a run with
T_F = 1, T_B = 2: before the other rank's computation of that moment, so that the transfer overlaps with it.

    rank 0   0F0 0SEND_F0           0F1 0SEND_F1                              0RECV_B0  0B0 ...
    rank 1            1RECV_F0               1RECV_F1  1F0  1B0 1SEND_B0                1F1 ...
                                                       runs while 0F1 ends

So the lists of all ranks are parts of one sequence, in which a send and its receive are neighbours, and so are the
parts of a reduction. An action may wait for all that was posted before it on its rank (where a receive, first use of
a channel, or synchronization of the device holds up the host): the earliest one that isn't done can still run. No
table hangs, even if each message holds up both ranks (tests/schedule/passes/test_rendezvous.py). A rank receives from
another in the order of its sends, by which NCCL matches them.

A message needs a send and a receive only between different ranks. Nothing comes between the actions of a pair: the
receives of both are before them, their sends and reductions behind them.

A stage's reduction comes right after its last weight gradient. Each rank starts them in the table's own
`reduction_order`, if it has one: a stage that is ready out of turn waits for those before it.
"""

from collections.abc import Callable, Container
from dataclasses import replace
from itertools import chain, pairwise
from operator import itemgetter
from typing import TypeVar

from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.search.evaluator import Evaluator
from lightning_hanayo.schedule.table import Action, Kind, Table, cell_waits, executable_order, last_gradients, producers

_COSTS = CostModel()
_HOP = 0.01
"""of a message between two ranks: less than the actions of a stage take"""


def complete(table: Table) -> tuple[tuple[Action, ...], ...]:
    """The table's actions with communication inserted, one tuple per pipeline rank; `table` is valid."""
    rank_of, place = table.stage_ranks, _places(table)
    cells = [[((place[action], 0), action) for action in row] for row in table.actions]
    for consumer, producer in producers(table).items():
        sender, receiver = rank_of[producer.stage], rank_of[consumer.stage]
        if sender != receiver:
            kinds = (Kind.SEND_F, Kind.RECV_F) if consumer.kind is Kind.F else (Kind.SEND_B, Kind.RECV_B)
            send = Action(producer.stage, kinds[0], producer.microbatch)
            receive = Action(consumer.stage, kinds[1], consumer.microbatch)
            behind = place[table.partner_of.get(producer, producer)]
            cells[sender].append(((behind, 1), send))
            cells[receiver].append(((behind, 1), receive))
    last, begun = last_gradients(table), [-1] * table.num_ranks
    for stage in reduction_order(table):
        if stage in last:
            rank = rank_of[stage]
            maker = table.actions[rank][last[stage]]
            begun[rank] = max(begun[rank], place[table.partner_of.get(maker, maker)])
            cells[rank].append(((begun[rank], 2), Action(stage, Kind.REDUCE_GRAD, None)))
    return tuple(tuple(action for _, action in sorted(row, key=itemgetter(0))) for row in cells)


def messages_per_microbatch(table: Table) -> int:
    """How many messages between ranks one micro-batch needs: forward and, if the table has backwards, backward."""
    hops = sum(one != other for one, other in pairwise(table.stage_ranks))
    trains = any(action.kind is not Kind.F for row in table.actions for action in row)
    return (1 + trains) * hops


def message_pairs(table: Table) -> set[tuple[int, int]]:
    """The (sender, receiver) of all messages that a batch of any size can have in the table's layout."""
    hops = pairwise(table.stage_ranks)
    return {pair for one, other in hops if one != other for pair in ((one, other), (other, one))}


def _places(table: Table) -> dict[Action, int]:
    """The place of each action in one sequence of all ranks' actions: by the ends of a run.

    Messages take a little time in that run. Without it, actions would end at the same time where in a real run one of
    them ends first, and with the places the other way round a transfer could not overlap with it.
    """
    waits, rank_of = cell_waits(table), table.stage_ranks
    free = [0.0] * table.num_ranks
    ends: dict[Action, float] = {}
    seconds = set(table.partner_of.values())
    for action in executable_order(table.actions, waits):
        if action in seconds:
            continue
        rank, cell = rank_of[action.stage], [action, *([second] if (second := table.partner_of.get(action)) else [])]
        arrivals = [ends[other] + _HOP * (rank_of[other.stage] != rank) for other in waits[action]]
        free[rank] = max(free[rank], *arrivals, 0.0) + sum(_COSTS.of(table, one) for one in cell)
        ends |= dict.fromkeys(cell, free[rank])
    in_order = sorted(ends, key=ends.__getitem__)  # among equals, what others wait for stays first
    return {action: place for place, action in enumerate(in_order)}


def reduction_order(table: Table) -> tuple[int, ...]:
    """The stages in the order in which every rank starts their gradient reductions.

    Data ranks that run different tables of one layout must share it: collectives are matched by their order alone.
    """
    if table.reduction_order:
        return table.reduction_order
    last = last_gradients(table)
    return tuple(sorted(last, key=lambda stage: (last[stage], stage)))


AnyTable = TypeVar("AnyTable", bound=Table)


def forward_only(schedule: AnyTable, microbatches: Container[int | None] | None = None) -> AnyTable:
    """The forwards alone, of `microbatches` or of all, for validation and prediction. None waits for a backward."""
    return _only(schedule, lambda a: a.kind is Kind.F and (microbatches is None or a.microbatch in microbatches))


def forwards_before_backwards(schedule: AnyTable) -> AnyTable:
    """The same schedule with each rank's forwards before all else, for a loss of all micro-batches together."""
    rows = (sorted(row, key=lambda action: action.kind is not Kind.F) for row in schedule.actions)
    return replace(schedule, actions=tuple(map(tuple, rows)), pairs=frozenset())


def without_forwards(schedule: AnyTable, microbatches: Container[int | None]) -> AnyTable:
    """The same schedule without the forwards of `microbatches`, which have run before."""
    return _only(schedule, lambda action: action.kind is not Kind.F or action.microbatch not in microbatches)


def last_backward_only(schedule: AnyTable, microbatches: Container[int | None]) -> AnyTable:
    """The last stage's backwards of `microbatches` alone, for steps whose gradients don't reach the stack."""
    last = schedule.num_stages - 1
    return _only(schedule, lambda a: a.stage == last and a.kind is not Kind.F and a.microbatch in microbatches)


def first_microbatches(schedule: AnyTable, num_microbatches: int) -> AnyTable:
    """The same schedule for a smaller batch: without the micro-batches beyond the last one.

    Reductions keep the order of the whole schedule: another data rank may run more micro-batches at the same time.
    """
    made = _only(schedule, lambda a: a.microbatch is None or a.microbatch < num_microbatches)
    return replace(made, num_microbatches=num_microbatches, reduction_order=reduction_order(schedule))


def _only(schedule: AnyTable, keeps: Callable[[Action], bool]) -> AnyTable:
    """The same schedule without the other actions, and without their pairs."""
    rows = tuple(tuple(filter(keeps, row)) for row in schedule.actions)
    return replace(schedule, actions=rows, pairs=frozenset(pair for pair in schedule.pairs if all(map(keeps, pair))))


def with_loss_stage(schedule: AnyTable) -> AnyTable:
    """The schedule with one more stage on rank 0 that holds head and loss, unless it begins and ends there already.

        1f1b, P = 2     rank 0   0F0 0F1     2F0 2B0   .   0B0 ...      2 = head and loss, in `training_step`
                        rank 1       1F0     1F1     1B0 ...

    The loss's `F` and `B` (which take no time, and which others wait for) are placed where they become ready while the
    schedule runs with T_F = 1, T_B = 2, before the next action of rank 0. That is the order of a possible run, so it
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
    # In a tie the loss goes first (it is first in the list, the sort is stable): others wait for it
    first = sorted([*chain(*losses), *schedule.actions[0]], key=start.__getitem__)
    return replace(extended, actions=(tuple(first), *schedule.actions[1:]))

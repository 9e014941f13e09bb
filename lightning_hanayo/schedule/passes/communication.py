"""The communication pass: adds sends, receives and gradient reductions to a compute-only table.

Between two compute actions of a rank all communication is posted together, in one call of the transport:

    ... 1F2 | 1SEND_F2  1RECV_F4 | 1F3 | ... 1F4
          sent right after      posted one compute action before its consumer, or earlier

A message needs a send and a receive only between different ranks. Two ranks match their messages by order alone (NCCL),
so a rank receives from another in the order of its sends: a receive that would come too late moves ahead.

A stage's reduction comes right after its last weight gradient. Twins reduce together, each rank with an action of its
own (also where one of them had no micro-batch). So that both ranks of every pair start them in the same order, all
reductions of a table have one order; a stage that is ready out of turn waits for those before it. The order is the
table's own `reduction_order`, or else that in which both twins are ready:

    chimera, P = 4      rank 0   ... 7B3 | 7REDUCE_GRAD | 0B0  0B1 | 0REDUCE_GRAD        twins: 0 and 4, 3 and 7
                        rank 3   ... 3B1 | 3REDUCE_GRAD | 4B2  4B3 | 4REDUCE_GRAD
"""

from collections import defaultdict
from collections.abc import Sequence

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.dependency import last_gradients, producers, source_stage
from lightning_hanayo.schedule.table import Table


def complete(table: Table, ahead: int = 1) -> tuple[tuple[Action, ...], ...]:
    """The table's actions with communication inserted, one tuple per pipeline rank.

    Args:
        table: a valid table.
        ahead: how many compute actions before its consumer a receive is posted at the latest.

    Sends and receives must not block: a receive is posted before the send it matches can even run. So the transport
    needs a channel of its own per ordered pair of ranks. Where a receive holds up a send (one NCCL stream for both
    directions, or one grouped call for all messages), tables deadlock (decision 3 in docs/design/decisions.md).

    Nor may reductions block: a rank starts its part when it gets there, goes on computing (its twin may wait for just
    that before it can start its own part), and waits for the sums after its last action.
    """
    rank_of = table.stage_ranks
    position = {action: position for row in table.actions for position, action in enumerate(row)}
    send_after: dict[Action, Action] = {}
    pairs: dict[tuple[int, int], list[tuple[int, int, Action]]] = defaultdict(list)
    for consumer, producer in producers(table).items():
        pair = rank_of[producer.stage], rank_of[consumer.stage]
        if pair[0] != pair[1]:
            send_after[producer], receive = _send_and_receive(producer, consumer)
            pairs[pair].append((position[producer], max(0, position[consumer] - ahead), receive))
    receives = _in_order_of_sends(pairs)
    reductions = _reductions(table)
    completed: list[tuple[Action, ...]] = []
    for rank, row in enumerate(table.actions):
        actions: list[Action] = []
        for number, action in enumerate(row):
            actions += [*receives[rank, number], *reductions[rank, number], action]
            actions += [send_after[action]] if action in send_after else []
        completed.append((*actions, *reductions[rank, len(row)]))
    return tuple(completed)


def messages_per_microbatch(table: Table) -> float:
    """How many messages between ranks one micro-batch needs: forward and, if the table has backwards, backward."""
    ranks, per_replica = table.stage_ranks, table.stages_per_replica
    sources = [source_stage(Action(stage, Kind.F, 0), per_replica) for stage in range(table.num_stages)]
    hops = sum(source is not None and ranks[source] != ranks[stage] for stage, source in enumerate(sources))
    trains = any(action.kind is not Kind.F for row in table.actions for action in row)
    return (1 + trains) * hops / table.num_replicas


def message_pairs(table: Table) -> set[tuple[int, int]]:
    """The (sender, receiver) of all messages that a batch of any size can have in the table's layout."""
    ranks, per_replica = table.stage_ranks, table.stages_per_replica
    hops = ((ranks[stage], ranks[stage + 1]) for stage in range(table.num_stages - 1) if (stage + 1) % per_replica)
    return {pair for one, other in hops if one != other for pair in ((one, other), (other, one))}


def _send_and_receive(producer: Action, consumer: Action) -> tuple[Action, Action]:
    forward = consumer.kind is Kind.F
    send = Action(producer.stage, Kind.SEND_F if forward else Kind.SEND_B, producer.microbatch)
    return send, Action(consumer.stage, Kind.RECV_F if forward else Kind.RECV_B, consumer.microbatch)


def _in_order_of_sends(
    pairs: dict[tuple[int, int], list[tuple[int, int, Action]]],
) -> dict[tuple[int, int], list[Action]]:
    """The receives by (rank, position before which they are posted), none after a later-sent one of the same pair."""
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for (_, rank), messages in sorted(pairs.items()):
        placed, latest = [], None
        for _, position, receive in sorted(messages, key=lambda message: message[0], reverse=True):
            latest = position if latest is None else min(position, latest)
            placed.append((latest, receive))
        for position, receive in reversed(placed):
            receives[rank, position].append(receive)
    return receives


def reduction_order(table: Table) -> tuple[int, ...]:
    """The stages in the order in which every rank starts their gradient reductions.

    Data ranks that run different tables of one layout must share it: collectives are matched by their order alone.
    """
    if table.reduction_order:
        return table.reduction_order
    last, twins = _last_gradients(table), _twins(table)

    def ready(stage: int) -> tuple[int, int]:
        return max(last[stage], last[twins[stage]]), stage % table.stages_per_replica

    return tuple(sorted(last, key=ready))


def _last_gradients(table: Table) -> dict[int, int]:
    """Where in its rank's row each stage makes its last weight gradient; -1 where only its twin had a micro-batch."""
    last, twins = last_gradients(table), _twins(table)
    return {**{twins[stage]: -1 for stage in last}, **last}


def _twins(table: Table) -> Sequence[int]:
    return table.replica_of or range(table.num_stages)


def _reductions(table: Table) -> dict[tuple[int, int], list[Action]]:
    """The reductions by (rank, position before which they are started), in one order on all ranks."""
    last = _last_gradients(table)
    reductions: dict[tuple[int, int], list[Action]] = defaultdict(list)
    begun = [0] * table.num_ranks
    for stage in reduction_order(table):
        if stage in last:
            rank = table.stage_ranks[stage]
            begun[rank] = max(begun[rank], last[stage] + 1)
            reductions[rank, begun[rank]].append(Action(stage, Kind.REDUCE_GRAD, None))
    return reductions

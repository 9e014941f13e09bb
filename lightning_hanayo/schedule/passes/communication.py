"""The communication pass: a compute-only table completed with sends, receives and gradient reductions.

Between two compute actions of a rank stands one run of communication, which the engine hands to the transport as one
call:

    ... 1F2 | 1SEND_F2  1RECV_F4 | 1F3 | ... 1F4
          sent right after      posted one compute ahead of its consumer, or earlier

A message needs a send and a receive only between different ranks. A pair of ranks matches messages by order alone
(NCCL), so receives from one rank stand in the order of its sends: one that would come too late moves ahead.

A stage's reduction stands right after its last weight gradient. Twins reduce together, each rank with an entry of its
own (also where one of them had no micro-batch). So that both ranks of every pair meet in the same order, all reductions
of a table have one order; a stage that is done out of turn waits for those before it. The order is the schedule's own
`reduction_order`, or else that in which both twins are done:

    chimera, P = 4      rank 0   ... 7B3 | 7REDUCE_GRAD | 0B0  0B1 | 0REDUCE_GRAD        twins: 0 and 4, 3 and 7
                        rank 3   ... 3B1 | 3REDUCE_GRAD | 4B2  4B3 | 4REDUCE_GRAD
"""

from collections import defaultdict

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.dependency import waits_in
from lightning_hanayo.schedule.table import Schedule


def complete(schedule: Schedule, ahead: int = 1) -> tuple[tuple[Action, ...], ...]:
    """The schedule's actions with communication inserted, one tuple per pipeline rank.

    Args:
        schedule: a valid schedule.
        ahead: how many compute actions before its consumer a receive is posted at the latest.

    Sends and receives must not block: a receive is posted before the send it matches can even run. So the transport
    needs a channel of its own per ordered pair of ranks. Where a receive holds up a send (one NCCL stream for both
    directions, or one grouped call for a whole run), tables hang (decision 3 in docs/design/decisions.md).

    Nor may reductions block: a rank starts its part when it gets there, goes on computing (its twin may wait for just
    that before it can start its own), and waits for the sums after its last action.
    """
    waits = waits_in(schedule.actions, schedule.num_stages, schedule.num_microbatches, schedule.num_chains)
    rank_of = schedule.stage_ranks
    place = {action: place for row in schedule.actions for place, action in enumerate(row)}
    sends: dict[Action, list[Action]] = defaultdict(list)
    pairs: dict[tuple[int, int], list[tuple[int, int, Action]]] = defaultdict(list)
    for row in schedule.actions:
        for action in row:
            for source in waits[action]:
                if rank_of[source.stage] != rank_of[action.stage]:
                    send, receive = _message(source, action)
                    sends[source].append(send)
                    pair = rank_of[source.stage], rank_of[action.stage]
                    pairs[pair].append((place[source], max(0, place[action] - ahead), receive))
    receives = _in_order_of_sends(pairs)
    reduces = _reductions(schedule)
    return tuple(
        tuple(
            entry
            for place, action in enumerate(row)
            for entry in (
                *receives[rank, place],
                *reduces[rank, place],
                action,
                *sends[action],
            )
        )
        + tuple(reduces[rank, len(row)])
        for rank, row in enumerate(schedule.actions)
    )


def _message(source: Action, consumer: Action) -> tuple[Action, Action]:
    forward = consumer.kind is Kind.F
    send = Action(source.stage, Kind.SEND_F if forward else Kind.SEND_B, source.microbatch)
    return send, Action(consumer.stage, Kind.RECV_F if forward else Kind.RECV_B, consumer.microbatch)


def _in_order_of_sends(
    pairs: dict[tuple[int, int], list[tuple[int, int, Action]]],
) -> dict[tuple[int, int], list[Action]]:
    """The receives by (rank, place before which they are posted), none after a later-sent one of the same pair."""
    receives: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for (_, rank), messages in sorted(pairs.items()):
        placed, latest = [], None
        for _, place, receive in sorted(messages, key=lambda message: message[0], reverse=True):
            latest = place if latest is None else min(place, latest)
            placed.append((latest, receive))
        for place, receive in reversed(placed):
            receives[rank, place].append(receive)
    return receives


def reduction_order(schedule: Schedule) -> tuple[int, ...]:
    """The stages in the order in which every rank starts their gradient reductions.

    Data ranks that play different tables of one layout must share it: a collective is matched by its order alone.
    """
    if schedule.reduction_order:
        return schedule.reduction_order
    last = _last_gradients(schedule)
    twins = schedule.replica_of or range(schedule.num_stages)
    return tuple(sorted(last, key=lambda stage: (max(last[stage], last[twins[stage]]), stage % schedule.chain_length)))


def _last_gradients(schedule: Schedule) -> dict[int, int]:
    """Where in its rank's row each stage makes its last weight gradient; -1 where only its twin had a micro-batch."""
    ends = (
        (action.stage, place)
        for row in schedule.actions
        for place, action in enumerate(row)
        if action.kind in (Kind.B, Kind.W)
    )
    last = dict(ends)
    twins = schedule.replica_of or range(schedule.num_stages)
    return {**{twins[stage]: -1 for stage in last}, **last}


def _reductions(schedule: Schedule) -> dict[tuple[int, int], list[Action]]:
    """The reductions by (rank, place before which they are started): all ranks meet in them in one order."""
    last = _last_gradients(schedule)
    reduces: dict[tuple[int, int], list[Action]] = defaultdict(list)
    begun = [0] * schedule.num_ranks
    for stage in reduction_order(schedule):
        if stage in last:
            rank = schedule.stage_ranks[stage]
            begun[rank] = max(begun[rank], last[stage] + 1)
            reduces[rank, begun[rank]].append(Action(stage, Kind.REDUCE_GRAD, None))
    return reduces

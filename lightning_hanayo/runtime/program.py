"""The program: one pipeline rank's completed action list, with where each action's packet comes from and goes to.

Runs of messages are taken together into exchanges. All that can be known before a batch is worked out here, once.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from lightning_hanayo.runtime.comm.point_to_point import MessageKey
from lightning_hanayo.schedule import Action, Kind, Schedule, complete
from lightning_hanayo.schedule.dependency import producers, source_stage, target_stage


@dataclass(frozen=True)
class Exchange:
    """Messages that start together: (route, peer) of each."""

    sends: tuple[tuple[MessageKey, int], ...]
    receives: tuple[tuple[MessageKey, int], ...]


@dataclass(frozen=True)
class Compute:
    """An action of a stage: the route of the packet it takes, and of the one it hands on."""

    action: Action
    arrives: MessageKey | None
    """None at the ends of the model, and for a weight gradient"""
    leaves: MessageKey | None
    is_local: bool
    """whether what arrives comes from this rank"""
    frees: tuple[MessageKey, ...] = ()
    """what this rank has sent and its peer has surely taken once this packet is there: these buffers are free"""


@dataclass(frozen=True)
class Program:
    """What one rank does, in order. The bare actions are reductions."""

    moves: tuple[Compute | Exchange | Action, ...]
    trains: bool
    """whether there is a backward in it"""

    @staticmethod
    def of(schedule: Schedule, rank: int) -> "Program":
        """The program of pipeline rank `rank` in `schedule`."""
        moves: list[Compute | Exchange | Action] = []
        frees = _frees(schedule, rank)
        for is_message, run in groupby(complete(schedule)[rank], key=lambda action: action.kind.is_message):
            if is_message:
                moves.append(_exchange(run, schedule))
            else:
                moves.extend(_compute(a, schedule, frees.get(a, ())) if a.kind.is_compute else a for a in run)
        trains = any(action.kind is not Kind.F for action in schedule.actions[rank])
        return Program(tuple(moves), trains)


def _compute(action: Action, schedule: Schedule, frees: tuple[MessageKey, ...]) -> Compute:
    per_replica = schedule.stages_per_replica
    source, target = source_stage(action, per_replica), target_stage(action, per_replica)
    is_local = source is not None and schedule.stage_ranks[source] == schedule.stage_ranks[action.stage]
    arrives = None if source is None else _key(action, source)
    return Compute(action, arrives, None if target is None else _key(action, target), is_local, frees)


def _frees(schedule: Schedule, rank: int) -> dict[Action, tuple[MessageKey, ...]]:
    """Per action the messages that its packet answers: the peer took them before it made the packet.

    rank 0   0F0 0F1 ...... 3F0        what 3F0 gets was made by 2F0, behind 1F0: the buffer of 0F0's message is free,
    rank 1       1F0 2F0 1F1           0F1's isn't yet
    """
    ranks = schedule.stage_ranks
    places = {action: place for row in schedule.actions for place, action in enumerate(row)}
    producer_of = producers(schedule)
    consumer_of = {producer: consumer for consumer, producer in producer_of.items()}
    taken: dict[int, list[tuple[int, MessageKey]]] = defaultdict(list)  # per peer: (where in its row, what)
    frees: dict[Action, tuple[MessageKey, ...]] = {}
    for action in schedule.actions[rank]:
        if (producer := producer_of.get(action)) is not None:
            peer, made = ranks[producer.stage], places[producer]
            frees[action] = tuple(key for place, key in taken[peer] if place <= made)
            taken[peer] = [message for message in taken[peer] if message[0] > made]
        if (consumer := consumer_of.get(action)) is not None and (peer := ranks[consumer.stage]) != rank:
            taken[peer].append((places[consumer], _key(action, consumer.stage)))
    return frees


def _exchange(run: Iterable[Action], schedule: Schedule) -> Exchange:
    sends, receives, per_replica = [], [], schedule.stages_per_replica
    for action in run:
        source, target = source_stage(action, per_replica), target_stage(action, per_replica)
        if target is not None:
            sends.append((_key(action, target), schedule.stage_ranks[target]))
        elif source is not None:
            receives.append((_key(action, source), schedule.stage_ranks[source]))
    return Exchange(tuple(sends), tuple(receives))


def _key(action: Action, other: int) -> MessageKey:
    """The key of the message between the stage of `action` and stage `other`."""
    assert action.microbatch is not None
    direction: Literal["forward", "backward"] = "forward" if action.kind.is_forward else "backward"
    return MessageKey(min(action.stage, other), direction, action.microbatch)

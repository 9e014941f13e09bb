"""The program: the list of everything one pipeline rank does in a batch, worked out once from the schedule.

Each computation knows the keys of the messages it needs and makes. Consecutive messages start together.
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
class Communicate:
    """Messages whose transfers start together: the key and the other pipeline rank of each."""

    sends: tuple[tuple[MessageKey, int], ...]
    receives: tuple[tuple[MessageKey, int], ...]


@dataclass(frozen=True)
class Compute:
    """An action of a stage, and the keys of its messages: None at the ends of the model, and for a weight gradient."""

    action: Action
    input_key: MessageKey | None
    output_key: MessageKey | None
    is_local: bool
    """whether the message it needs was made on this rank"""
    completed_sends: tuple[MessageKey, ...] = ()
    """messages of this rank that have certainly been received once the input is here: their buffers are free again"""


@dataclass(frozen=True)
class Program:
    """What one rank does, in order. A bare action is the reduction of its stage's gradients."""

    steps: tuple[Compute | Communicate | Action, ...]
    is_whole: bool
    """whether it has forward and backward of each micro-batch"""

    @staticmethod
    def from_schedule(schedule: Schedule, rank: int) -> "Program":
        """The program of pipeline rank `rank` in `schedule`."""
        steps: list[Compute | Communicate | Action] = []
        completed = _completed_sends(schedule, rank)
        for is_message, run in groupby(complete(schedule)[rank], key=lambda action: action.kind.is_message):
            if is_message:
                steps.append(_communicate(run, schedule))
            else:
                steps.extend(_compute(a, schedule, completed.get(a, ())) if a.kind.is_compute else a for a in run)
        forwards, backwards = (
            {(action.stage, action.microbatch) for action in schedule.actions[rank] if action.kind in kinds}
            for kinds in ((Kind.F,), (Kind.B, Kind.I))
        )
        return Program(tuple(steps), forwards == backwards != set())


def _compute(action: Action, schedule: Schedule, completed: tuple[MessageKey, ...]) -> Compute:
    per_replica = schedule.stages_per_replica
    source, target = source_stage(action, per_replica), target_stage(action, per_replica)
    is_local = source is not None and schedule.stage_ranks[source] == schedule.stage_ranks[action.stage]
    input_key = None if source is None else _key(action, source)
    return Compute(action, input_key, None if target is None else _key(action, target), is_local, completed)


def _completed_sends(schedule: Schedule, rank: int) -> dict[Action, tuple[MessageKey, ...]]:
    """For each action the messages that its sender had received before it made the action's input.

    rank 0   0F0 0F1 ...... 3F0        3F0's input is made by 2F0, after 1F0: the message of 0F0 has been received,
    rank 1       1F0 2F0 1F1           that of 0F1 perhaps not yet
    """
    ranks = schedule.stage_ranks
    positions = {action: position for row in schedule.actions for position, action in enumerate(row)}
    producer_of = producers(schedule)
    consumer_of = {producer: consumer for consumer, producer in producer_of.items()}
    pending: dict[int, list[tuple[int, MessageKey]]] = defaultdict(list)  # by peer: (its consumer's position, key)
    completed: dict[Action, tuple[MessageKey, ...]] = {}
    for action in schedule.actions[rank]:
        if (producer := producer_of.get(action)) is not None:
            peer, made = ranks[producer.stage], positions[producer]
            completed[action] = tuple(key for position, key in pending[peer] if position <= made)
            pending[peer] = [message for message in pending[peer] if message[0] > made]
        if (consumer := consumer_of.get(action)) is not None and (peer := ranks[consumer.stage]) != rank:
            pending[peer].append((positions[consumer], _key(action, consumer.stage)))
    return completed


def _communicate(run: Iterable[Action], schedule: Schedule) -> Communicate:
    sends, receives, per_replica = [], [], schedule.stages_per_replica
    for action in run:
        source, target = source_stage(action, per_replica), target_stage(action, per_replica)
        if target is not None:
            sends.append((_key(action, target), schedule.stage_ranks[target]))
        elif source is not None:
            receives.append((_key(action, source), schedule.stage_ranks[source]))
    return Communicate(tuple(sends), tuple(receives))


def _key(action: Action, other: int) -> MessageKey:
    """The key of the message between the stage of `action` and stage `other`."""
    assert action.microbatch is not None
    direction: Literal["forward", "backward"] = "forward" if action.kind.is_forward else "backward"
    return MessageKey(min(action.stage, other), direction, action.microbatch)

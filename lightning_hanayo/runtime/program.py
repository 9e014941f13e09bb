"""The program: the list of everything one pipeline rank does in a batch, worked out once from the schedule.

Each computation knows the keys of the messages it needs and makes. Consecutive messages start together.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

from lightning_hanayo.runtime.comm.message import MessageKey
from lightning_hanayo.schedule import Action, Kind, Schedule, complete
from lightning_hanayo.schedule.dependency import source_stage, target_stage


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
    is_last_gradient: bool = False
    """whether no later action makes gradients of its stage's weights, nor does one that runs at the same time"""


@dataclass(frozen=True)
class Pair:
    """Two computations, of different micro-batches, that run at once."""

    first: Compute
    second: Compute


@dataclass(frozen=True)
class Program:
    """What one rank does, in order. A bare action is the reduction of its stage's gradients."""

    steps: tuple[Compute | Pair | Communicate | Action, ...]
    is_whole: bool
    """whether it has forward and backward of each micro-batch"""
    edges: frozenset[Action] = frozenset()
    """each stage's first forward, and the action that makes its last gradients: with weights that are kept for a batch
    they do what others don't"""

    @property
    def pairs(self) -> list[tuple[Action, Action]]:
        """The actions that run at once."""
        return [(step.first.action, step.second.action) for step in self.steps if isinstance(step, Pair)]

    @staticmethod
    def from_schedule(schedule: Schedule, rank: int) -> "Program":
        """The program of pipeline rank `rank` in `schedule`."""
        own = schedule.actions[rank]
        first = {action.stage: action for action in reversed(own) if action.kind is Kind.F}
        last = {action.stage: action for action in own if action.kind in _MAKES_GRADIENTS}
        steps: list[Compute | Pair | Communicate | Action] = []
        for is_message, run in groupby(complete(schedule)[rank], key=lambda action: action.kind.is_message):
            if is_message:
                steps.append(_communicate(run, schedule))
            else:
                actions = [_compute(a, schedule, a == last.get(a.stage)) if a.kind.is_compute else a for a in run]
                steps.extend(_paired(actions, schedule))
        forwards, backwards = (
            {(action.stage, action.microbatch) for action in own if action.kind in kinds}
            for kinds in ((Kind.F,), (Kind.B, Kind.I))
        )
        return Program(tuple(steps), forwards == backwards != set(), frozenset((*first.values(), *last.values())))


_MAKES_GRADIENTS = (Kind.B, Kind.W)


def _paired(run: Sequence[Compute | Action], schedule: Schedule) -> Iterator[Compute | Pair | Action]:
    """The actions between messages, with those that run at once in one step."""
    rest = iter(run)
    for one in rest:
        if isinstance(one, Compute) and one.action in schedule.partner_of:
            second = next(rest)
            assert isinstance(second, Compute), "a pair's actions are neighbours"
            yield _pair(one, second)
        else:
            yield one


def _pair(first: Compute, second: Compute) -> Pair:
    """Of two that make gradients of one stage, none is the last one."""
    actions = first.action, second.action
    if actions[0].stage == actions[1].stage and all(action.kind in _MAKES_GRADIENTS for action in actions):
        first, second = (replace(one, is_last_gradient=False) for one in (first, second))
    return Pair(first, second)


def _compute(action: Action, schedule: Schedule, is_last_gradient: bool) -> Compute:
    num_stages = schedule.num_stages
    source, target = source_stage(action, num_stages), target_stage(action, num_stages)
    is_local = source is not None and schedule.stage_ranks[source] == schedule.stage_ranks[action.stage]
    input_key = None if source is None else _key(action, source)
    output_key = None if target is None else _key(action, target)
    return Compute(action, input_key, output_key, is_local, is_last_gradient)


def _communicate(run: Iterable[Action], schedule: Schedule) -> Communicate:
    sends, receives, num_stages = [], [], schedule.num_stages
    for action in run:
        source, target = source_stage(action, num_stages), target_stage(action, num_stages)
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

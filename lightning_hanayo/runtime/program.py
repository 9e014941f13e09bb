"""The program: one pipeline rank's completed action list, with where each action's packet comes from and goes to.

Runs of messages are taken together into exchanges. All that can be known before a batch is worked out here, once.
"""

from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from lightning_hanayo.runtime.comm.point_to_point import MessageKey
from lightning_hanayo.schedule import Action, Kind, Schedule, complete

_SENDS = (Kind.SEND_F, Kind.SEND_B)


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
                moves.append(_exchange(list(run), schedule.stage_ranks))
            else:
                moves.extend(_compute(a, schedule, frees.get(a, ())) if a.kind.is_compute else a for a in run)
        trains = any(action.kind is not Kind.F for action in schedule.actions[rank])
        return Program(tuple(moves), trains)


def _compute(action: Action, schedule: Schedule, frees: tuple[MessageKey, ...]) -> Compute:
    if action.kind is Kind.W:
        return Compute(action, None, None, False)
    arriving, leaving = _borders(action, schedule)
    ranks = schedule.stage_ranks
    is_local = arriving is not None and ranks[arriving] == ranks[arriving + 1]
    return Compute(action, _route(arriving, action), _route(leaving, action), is_local, frees)


def _frees(schedule: Schedule, rank: int) -> dict[Action, tuple[MessageKey, ...]]:
    """Per action the messages that its packet answers: the peer took them before it made the packet.

    rank 0   0F0 0F1 ...... 3F0        what 3F0 gets was made by 2F0, behind 1F0: the buffer of 0F0's message is free,
    rank 1       1F0 2F0 1F1           0F1's isn't yet
    """
    places = {action: place for row in schedule.actions for place, action in enumerate(row)}
    taken: dict[int, list[tuple[int, MessageKey]]] = defaultdict(list)  # per peer: (where in its row, what)
    frees: dict[Action, tuple[MessageKey, ...]] = {}
    for action in schedule.actions[rank]:
        step = 1 if action.kind is Kind.F else -1
        arriving, leaving = (None, None) if action.kind is Kind.W else _borders(action, schedule)
        if arriving is not None:
            peer = schedule.stage_ranks[action.stage - step]
            made = places[_neighbour(action, -step, places)]
            frees[action] = tuple(route for place, route in taken[peer] if place <= made)
            taken[peer] = [message for message in taken[peer] if message[0] > made]
        if leaving is not None and (peer := schedule.stage_ranks[action.stage + step]) != rank:
            route = _route(leaving, action)
            assert route is not None
            taken[peer].append((places[_neighbour(action, step, places)], route))
    return frees


def _neighbour(action: Action, step: int, present: Container[Action]) -> Action:
    """The action of the stage `step` further on that takes, or makes, this one's packet."""
    kinds = (Kind.F,) if action.kind is Kind.F else (Kind.B, Kind.I)
    stages = (Action(action.stage + step, kind, action.microbatch) for kind in kinds)
    return next(other for other in stages if other in present)


def _borders(action: Action, schedule: Schedule) -> tuple[int | None, int | None]:
    """Where the action's packet comes from, and where the one it makes goes."""
    before, behind = (_border(schedule, border) for border in (action.stage - 1, action.stage))
    return (before, behind) if action.kind is Kind.F else (behind, before)


def _border(schedule: Schedule, border: int) -> int | None:
    """`border`, the one behind that stage; None before the first stage of a chain, and behind the last one."""
    return border if (border + 1) % schedule.chain_length else None


def _route(border: int | None, action: Action) -> MessageKey | None:
    assert action.microbatch is not None
    return None if border is None else MessageKey(border, _direction(action.kind), action.microbatch)


def _direction(kind: Kind) -> Literal["forward", "backward"]:
    return "forward" if kind in (Kind.F, Kind.SEND_F, Kind.RECV_F) else "backward"


def _exchange(run: Sequence[Action], stage_ranks: tuple[int, ...]) -> Exchange:
    sends = tuple(_message(action, stage_ranks) for action in run if action.kind in _SENDS)
    return Exchange(sends, tuple(_message(action, stage_ranks) for action in run if action.kind not in _SENDS))


def _message(action: Action, stage_ranks: tuple[int, ...]) -> tuple[MessageKey, int]:
    """A stage's SEND_F and RECV_B cross the border behind it; its RECV_F and SEND_B the one before it."""
    assert action.microbatch is not None
    behind = action.kind in (Kind.SEND_F, Kind.RECV_B)
    other = action.stage + 1 if behind else action.stage - 1
    return MessageKey(min(action.stage, other), _direction(action.kind), action.microbatch), stage_ranks[other]

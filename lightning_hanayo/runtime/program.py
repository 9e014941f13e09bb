"""The program: one pipeline rank's completed action list, its runs of messages taken together into exchanges."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from lightning_hanayo.runtime.mail import Route
from lightning_hanayo.schedule import Action, Kind, Schedule, complete

_SENDS = (Kind.SEND_F, Kind.SEND_B)


@dataclass(frozen=True)
class Exchange:
    """Messages that start together: (route, peer) of each."""

    sends: tuple[tuple[Route, int], ...]
    receives: tuple[tuple[Route, int], ...]


@dataclass(frozen=True)
class Program:
    """What one rank does, in order."""

    moves: tuple[Action | Exchange, ...]
    stage_ranks: tuple[int, ...]
    rank: int

    @staticmethod
    def of(schedule: Schedule, rank: int) -> "Program":
        """The program of pipeline rank `rank` in `schedule`."""
        moves: list[Action | Exchange] = []
        for is_message, run in groupby(complete(schedule)[rank], key=lambda action: action.kind.is_message):
            actions = list(run)
            moves.extend([_exchange(actions, schedule.stage_ranks)] if is_message else actions)
        return Program(tuple(moves), schedule.stage_ranks, rank)

    @property
    def trains(self) -> bool:
        """Whether there is a backward in it."""
        return any(isinstance(move, Action) and move.kind is not Kind.F for move in self.moves)

    def is_local(self, border: int) -> bool:
        """Whether the stages on both sides of `border` (the one behind stage `border`) lie on this rank."""
        return 0 <= border < len(self.stage_ranks) - 1 and self.stage_ranks[border] == self.stage_ranks[border + 1]


def _exchange(run: Sequence[Action], stage_ranks: tuple[int, ...]) -> Exchange:
    sends = tuple(_message(action, stage_ranks) for action in run if action.kind in _SENDS)
    return Exchange(sends, tuple(_message(action, stage_ranks) for action in run if action.kind not in _SENDS))


def _message(action: Action, stage_ranks: tuple[int, ...]) -> tuple[Route, int]:
    """A stage's SEND_F and RECV_B cross the border behind it; its RECV_F and SEND_B the one before it."""
    assert action.microbatch is not None
    behind = action.kind in (Kind.SEND_F, Kind.RECV_B)
    other = action.stage + 1 if behind else action.stage - 1
    forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
    route = Route(min(action.stage, other), "forward" if forward else "backward", action.microbatch)
    return route, stage_ranks[other]

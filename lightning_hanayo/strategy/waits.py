"""Who waits for whom: which ranks hold the others up, and which ranks can never go on.

rank 0 --> rank 1 --> rank 2        rank 2 waits for nobody, so it holds up the others
rank 0 --> rank 1 --> rank 0        a circle: if neither has sent what the other waits for, none can ever go on
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Wait:
    """What a rank waits for: a message, or the other ranks of a collective.

    With a `number`, it ends only when each rank in `needs` has done that many operations on the `channel`. Of a
    collective, this rank has done as many.
    """

    what: str
    """as in "the activation of stage 1, micro-batch 3\""""
    ranks: tuple[int, ...]
    """from which it may come"""
    channel: str = ""
    """those that wait on the same one don't wait for each other; "" for none"""
    number: int = 0
    """0: it isn't counted"""
    needs: tuple[int, ...] = ()
    call: str = ""
    """the name of the collective, which all ranks must call"""


@dataclass(frozen=True)
class Status:
    """What one rank does.

    Args:
        rank: of the world.
        progress: grows with all that the rank does.
        still: seconds since `progress` has changed.
        at: the step and the phase, as "step 12 (training)"; "" if that isn't known.
        wait: None if it waits for no other rank.
        doing: where its code is, as "is in on_train_batch_start, model.py:31".
        source: the file and the number of that line, for the one who shows it.
        done: how many operations it has done on the channels that it was asked for.
    """

    rank: int
    progress: int
    still: float
    at: str = ""
    wait: Wait | None = None
    doing: str = ""
    source: tuple[str, int] | None = None
    done: Mapping[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Status":
        """What `to_json` was called on."""
        wait, source = fields["wait"], fields["source"]
        if wait is not None:
            wait = Wait(**wait | {name: tuple(wait[name]) for name in ("ranks", "needs")})
        return Status(**{**fields, "wait": wait, "source": None if source is None else tuple(source)})


@dataclass(frozen=True)
class Standstill:
    """What all ranks do at one moment: the statuses of those that answer, and what is the matter with the others."""

    statuses: Mapping[int, Status]
    absent: Mapping[int, str]

    def waits_for(self, rank: int) -> frozenset[int]:
        """The ranks that one waits for. In a collective: those that aren't in it."""
        wait = self.statuses[rank].wait if rank in self.statuses else None
        if wait is None:
            return frozenset()
        return frozenset(other for other in wait.ranks if other != rank and not self._is_at(other, wait.channel))

    @property
    def idle(self) -> list[int]:
        """The ranks that wait for nobody, though others may wait for them; those that don't answer are among them."""
        return sorted([*self.absent, *(rank for rank, status in self.statuses.items() if status.wait is None)])

    @property
    def to_blame(self) -> list[int]:
        """The ranks that hold the others up: those that wait for nobody; else a circle of waits, or a collective."""
        if self.idle:
            return self.idle
        together = sorted(rank for rank in self.statuses if not self.waits_for(rank))
        return together or self._circle()

    @property
    def held_up_at(self) -> frozenset[str]:
        """Where the ranks are that hold the others up: the same for each batch whose loader is slow at one line."""
        return frozenset(self._at(rank) for rank in self.to_blame)

    def _at(self, rank: int) -> str:
        if rank in self.absent:
            return self.absent[rank]
        status = self.statuses[rank]
        return status.wait.what if status.wait is not None else str(status.source or status.doing)

    def _is_at(self, rank: int, channel: str) -> bool:
        wait = self.statuses[rank].wait if rank in self.statuses else None
        return wait is not None and channel != "" and wait.channel == channel

    def _circle(self) -> list[int]:
        edges = {rank: self.waits_for(rank) for rank in self.statuses}
        return circle_in(edges)


def circle_in(edges: Mapping[int, Iterable[int]]) -> list[int]:
    """The ranks of a circle of waits, the lowest first, each before one that it waits for; [] if there is none."""
    done: set[int] = set()
    for start in sorted(edges):
        path: list[int] = []
        pending = [(start, 0)]
        while pending:
            rank, depth = pending.pop()
            del path[depth:]
            if rank in path:
                circle = path[path.index(rank) :]
                first = circle.index(min(circle))
                return circle[first:] + circle[:first]
            if rank in done:
                continue
            done.add(rank)
            path.append(rank)
            pending += [(other, depth + 1) for other in sorted(edges.get(rank, ()), reverse=True)]
    return []


@dataclass(frozen=True)
class Mismatch:
    """Ranks that can never go on, and why."""

    ranks: tuple[int, ...]
    why: str


def find_mismatch(before: Standstill, now: Standstill) -> Mismatch | None:
    """Ranks that can never go on. Only proof counts: a wrong answer ends a run that is only slow.

    Between the two samples all ranks were still, and the second says how often each has done what others wait for.
    """
    stuck = {
        rank: status.wait
        for rank, status in now.statuses.items()
        if status.wait is not None and status.wait.number and _is_same(before.statuses.get(rank), status)
    }
    for rank, wait in stuck.items():
        for other in wait.needs:
            if (peer := stuck.get(other)) is not None and _differ(wait, peer):
                return Mismatch((rank, other), f"they call different collectives, {wait.call} and {peer.call}")
    edges = {rank: [peer for peer in wait.needs if _is_behind(peer, wait, stuck, now)] for rank, wait in stuck.items()}
    circle = circle_in(edges)
    return Mismatch(tuple(circle), "each waits for what another of them can only do afterwards") if circle else None


def _is_same(before: Status | None, now: Status) -> bool:
    return before is not None and (before.progress, before.wait) == (now.progress, now.wait)


def _differ(one: Wait, other: Wait) -> bool:
    same_turn = (one.channel, one.number) == (other.channel, other.number)
    return same_turn and bool(one.call and other.call) and one.call != other.call


def _is_behind(peer: int, wait: Wait, stuck: Mapping[int, Wait], now: Standstill) -> bool:
    """Whether the peer is stuck, too, before it has done what the wait is for."""
    return peer in stuck and now.statuses[peer].done.get(wait.channel, wait.number) < wait.number

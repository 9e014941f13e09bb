"""Who waits for whom: which ranks hold the others up, and which ranks can never go on.

rank 0 --> rank 1 --> rank 2        rank 2 waits for nobody, so it holds up the others
rank 0 --> rank 1 --> rank 0        a circle: if neither has sent what the other waits for, none can ever go on

`report` says so as text, with the activities of the ranks that wait for nobody:

No progress for 15 s in step 12 (training).
  rank 2 (pipeline 1, data 0) waits for nobody: it is in on_train_batch_start, model.py:31: time.sleep(3600)
  rank 0 (pipeline 0, data 0) waits for rank 2: the activation of stage 1, micro-batch 3
  ranks 4 to 127 wait for rank 2
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Wait:
    """The wait of a rank for a message, or for the other ranks of a collective.

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
    """The state of one rank.

    Args:
        rank: of the world.
        progress: grows with all that the rank does.
        still: seconds since `progress` has changed.
        at: the step and the phase, as "step 12 (training)"; "" if that isn't known.
        wait: None if it waits for no other rank.
        doing: where its code is, as "is in on_train_batch_start, model.py:31: time.sleep(3600)".
        done: how many operations it has done on the channels that it was asked for.
    """

    rank: int
    progress: int
    still: float
    at: str = ""
    wait: Wait | None = None
    doing: str = ""
    done: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Status":
        """The status of which `asdict` and JSON have made these fields."""
        wait = fields["wait"]
        if wait is not None:
            wait = Wait(**wait | {name: tuple(wait[name]) for name in ("ranks", "needs")})
        return Status(**{**fields, "wait": wait})


@dataclass(frozen=True)
class Standstill:
    """All ranks at one moment: the statuses of those that answer, and why the others don't."""

    statuses: Mapping[int, Status]
    absent: Mapping[int, str]

    def waits_for(self, rank: int) -> frozenset[int]:
        """The ranks that one waits for. In a collective: those that aren't in it."""
        wait = self.statuses[rank].wait if rank in self.statuses else None
        if wait is None:
            return frozenset()
        waits = {other: self.statuses[other].wait for other in wait.ranks if other in self.statuses}
        there = {other for other, its in waits.items() if its is not None and its.channel == wait.channel != ""}
        return frozenset(wait.ranks) - there - {rank}

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
        return together or circle_in({rank: self.waits_for(rank) for rank in self.statuses})

    @property
    def held_up_at(self) -> frozenset[str]:
        """Where the ranks are that hold the others up: the same for each batch whose loader is slow at one line."""
        there = [self.statuses[rank] for rank in self.to_blame if rank in self.statuses]
        places = [one.doing if one.wait is None else one.wait.what for one in there]
        return frozenset((*places, *(self.absent[rank] for rank in self.to_blame if rank in self.absent)))


def circle_in(edges: Mapping[int, Iterable[int]]) -> list[int]:
    """The ranks of a circle of waits, the lowest first, each before one that it waits for; [] if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        circle: list[int] = error.args[1][:0:-1]  # each waits for the one before; the first is the last, too
        first = circle.index(min(circle))
        return circle[first:] + circle[:first]
    return []


@dataclass(frozen=True)
class Mismatch:
    """Ranks that can never go on, and why."""

    ranks: tuple[int, ...]
    why: str


def find_mismatch(before: Standstill, now: Standstill) -> Mismatch | None:
    """Ranks that can never go on. Only proof counts: a wrong answer ends a run that is only slow.

    Between the two samples all ranks were still. The second has the number of operations of each on the channels.
    """
    unmoved = {(rank, status.progress, status.wait) for rank, status in before.statuses.items()}
    stuck = {
        rank: status.wait
        for rank, status in now.statuses.items()
        if status.wait is not None and status.wait.number and (rank, status.progress, status.wait) in unmoved
    }
    edges = {}
    for rank, wait in stuck.items():
        others = [other for other in wait.needs if other in stuck]
        for other, peer in ((other, stuck[other]) for other in others):
            is_same_turn = (wait.channel, wait.number) == (peer.channel, peer.number)
            if is_same_turn and wait.call and peer.call and wait.call != peer.call:
                return Mismatch((rank, other), f"they call different collectives, {wait.call} and {peer.call}")
        # those that are stuck before the operation that ends this wait
        edges[rank] = [one for one in others if now.statuses[one].done.get(wait.channel, wait.number) < wait.number]
    circle = circle_in(edges)
    return Mismatch(tuple(circle), "each waits for what another of them can only do afterwards") if circle else None


MAX_LINES = 12
"""of a report"""
_MAX_BLAMED = 4
_PLURAL = {"waits": "wait", "is": "are", "does": "do", "has": "have"}
_PlaceOf = Callable[[int], str]


def report(standstill: Standstill, place: _PlaceOf) -> list[str]:
    """The lines of the report, without the first and the last, which say how long it lasts, and how it ends.

    Args:
        standstill: the state of all ranks.
        place: where a rank is in the layout, as "pipeline 1, data 0".
    """
    blamed = standstill.to_blame
    lines = _blamed(standstill, place)
    waiting = [rank for rank in sorted(standstill.statuses) if rank not in blamed]
    return lines + _waiting(standstill, waiting, place, MAX_LINES - 2 - len(lines))


def named(ranks: Iterable[int]) -> str:
    """Ranks in words.

    Example:
        >>> named([4, 5, 6, 9])
        'ranks 4 to 6 and 9'
    """
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    starts = [i for i, rank in enumerate(ordered) if i == 0 or rank != ordered[i - 1] + 1]
    runs = [ordered[start:end] for start, end in pairwise([*starts, len(ordered)])]
    parts = [part for run in runs for part in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run))]
    return f"ranks {', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else f"ranks {parts[0]}"


def summary(standstill: Standstill, place: _PlaceOf) -> str:
    """One line about the ranks that hold the others up."""
    return "; ".join(line.strip() for line in _blamed(standstill, place))


def _blamed(standstill: Standstill, place: _PlaceOf) -> list[str]:
    blamed = standstill.to_blame
    if not standstill.idle:
        return _grouped(standstill, blamed, place)
    lines = _merged([(rank, _idle(standstill, rank)) for rank in blamed], place)
    more = len(lines) - _MAX_BLAMED
    return lines if more <= 1 else [*lines[:_MAX_BLAMED], f"  and {more} more like them"]


def _idle(standstill: Standstill, rank: int) -> str:
    if rank in standstill.absent:
        return standstill.absent[rank]
    others = any(rank in standstill.waits_for(other) for other in standstill.statuses)
    return f"{'waits for nobody: it ' if others else ''}{standstill.statuses[rank].doing}"


def _waiting(standstill: Standstill, ranks: list[int], place: _PlaceOf, most: int) -> list[str]:
    """The waits of the other ranks; of large worlds without the messages, or in one line."""
    lines = _grouped(standstill, ranks, place)
    if len(lines) <= most:
        return lines
    lines = _merged([(rank, f"waits for {named(standstill.waits_for(rank))}") for rank in ranks], place)
    return lines if len(lines) <= most else [f"  {named(ranks)} wait for those, or for others that do"]


def _grouped(standstill: Standstill, ranks: list[int], place: _PlaceOf) -> list[str]:
    """A line for all ranks that wait for the same thing."""
    return _merged([(rank, _wait(standstill, rank)) for rank in ranks], place)


def _wait(standstill: Standstill, rank: int) -> str:
    wait = standstill.statuses[rank].wait
    assert wait is not None
    if others := standstill.waits_for(rank):
        return f"waits for {named(others)}: {wait.what}"
    return f"is in a collective with all its ranks, which hasn't ended: {wait.what}"


def _merged(texts: list[tuple[int, str]], place: _PlaceOf) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank, text in texts:
        by_text.setdefault(text, []).append(rank)
    lines = []
    for text, ranks in by_text.items():
        who = named(ranks)
        if len(ranks) == 1:
            who = f"{who} ({place(ranks[0])})"
        else:
            verb, _, rest = text.partition(" ")
            text = f"{_PLURAL[verb]} {rest}".replace(": it is ", ": they are ", 1)
        lines.append(f"  {who} {text}")
    return lines

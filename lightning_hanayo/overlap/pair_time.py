"""Timing of two actions of a rank that run at once: one device computes, one link carries collectives.

    F    gather |compute| wait ...  |compute|        where one action has to wait, the device goes to the other one;
    B           | wait  |compute    |  wait |compute the link carries one collective at a time

The order of the collectives on the link can be planned: then each of them waits until those before it have been
carried. All ranks of a cube must have the same order, so it can't be left to their clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import exp, inf
from random import Random
from typing import NamedTuple

TRIES = 2000
"""orders that `best_order` tries at most: about a third of a second for 100 collectives"""
ENOUGH = 1.002
"""it stops where a pair takes at most this multiple of the bound"""
_WARM = 0.02
"""by which part of the bound orders may be longer than the one that they change, at first"""
_SHIFTS = (-12, -6, -4, -3, -2, -1, 1, 2, 3, 4, 6, 12)
"""by how many places a collective may move at a time"""


class Segment(NamedTuple):
    """A part of an action: compute for a while, then start a collective, or wait for one, or neither."""

    compute: float = 0.0
    """seconds of the device"""
    start: float | None = None
    """seconds of the link that the collective takes which starts then; the first one that starts has number 0"""
    wait: int | None = None
    """the number of the collective whose result is needed then"""

    def scaled(self, factor: float) -> "Segment":
        """The same in another unit of time."""
        start = None if self.start is None else factor * self.start
        return self._replace(compute=factor * self.compute, start=start)


Segments = Sequence[Segment]
"""All of an action, in order."""

Order = Sequence[tuple[int, int]]
"""The order of collectives on the link: of each the action, 0 or 1, and its number there."""


@dataclass(frozen=True)
class PairRun:
    """Two actions that ran at once."""

    ends: tuple[float, float]
    """seconds until each has ended"""
    order: Order
    """of the collectives on the link"""
    prefer: int | None = None
    """the action that gets the device where both could use it; None: the one that has waited longer"""
    link_end: float = 0.0
    """seconds until the link has carried everything: collectives that nothing waits for, such as sums of weights'
    gradients, may still be under way when both actions have ended"""

    @property
    def seconds(self) -> float:
        """Until both have ended and the link is free: the next action begins with collectives, which queue up."""
        return max(*self.ends, self.link_end)

    @property
    def _length(self) -> tuple[float, float]:
        return round(self.seconds, 12), round(sum(self.ends), 12)


def run_alone(segments: Segments) -> float:
    """Seconds of an action that has device and link to itself."""
    (end,) = _Run([segments], None).run()
    return end


def run_pair(first: Segments, second: Segments, order: Order | None = None, prefer: int | None = None) -> PairRun:
    """Two actions at once, both ready at 0.

    Args:
        first: the action that has the device first.
        second: the other one.
        order: of all collectives on the link; None: as they start. If neither action can go on, it takes forever.
        prefer: which action gets the device where both could use it; None: the one that has waited longer.
    """
    return _Run([first, second], order, prefer).run_pair()


def best_order(first: Segments, second: Segments, tries: int = TRIES) -> PairRun:
    """The best order found: that in which the collectives start, and small changes to it (simulated annealing).

    The same arguments always give the same order.
    """
    runs = []
    for prefer, link_prefer in product((None, 0, 1), repeat=2):
        # The link carries the collective that started first; of several that wait, one of the action `link_prefer`.
        # This order counts as a plan, which may hold up a collective that another one could overtake.
        order = _Run([first, second], None, prefer, link_prefer).run_pair().order
        runs.append(run_pair(first, second, order, prefer))
    best = min(runs, key=lambda run: run._length)
    least = bound(first, second)
    random, current = Random(0), best
    for done in range(tries if len(best.order) > 1 else 0):
        if best.seconds <= least * ENOUGH:
            break
        changed = list(current.order)
        for _ in range(random.choice((0, 1, 1, 1, 2))):
            place = random.randrange(len(changed))
            moved = changed.pop(place)
            changed.insert(max(0, min(len(changed), place + random.choice(_SHIFTS))), moved)
        run = run_pair(first, second, changed, random.choice((None, 0, 1, current.prefer, current.prefer)))
        worse = run.seconds - current.seconds
        if worse <= 0 or random.random() < exp(-worse / (_WARM * least * (1 - done / tries))):
            current = run
            best = min(best, current, key=lambda run: run._length)
    return best


def bound(*actions: Segments) -> float:
    """Seconds that actions need at least together: of the device or of the link, whichever takes longer."""
    compute = sum(one.compute for action in actions for one in action)
    return max(compute, sum(one.start or 0.0 for action in actions for one in action))


@dataclass(eq=False)
class _Run:
    actions: Sequence[Segments]
    order: Order | None
    prefer: int | None = None
    link_prefer: int | None = None

    def __post_init__(self) -> None:
        self._device = self._link = 0.0
        self._ready = [0.0 for _ in self.actions]
        """when each action can use the device; infinity: that isn't known yet"""
        self._awaited: list[int | None] = [None for _ in self.actions]
        """the number of the own collective that each action waits for, whose end isn't known yet"""
        self._places = [0 for _ in self.actions]
        self._is_done = [False for _ in self.actions]
        self._started: list[list[tuple[float, float]]] = [[] for _ in self.actions]
        """when each collective started, and how long it takes the link"""
        self._waiting: list[tuple[int, int]] = []
        """started, but not yet carried, where there is no order"""
        self._ends: list[dict[int, float]] = [{} for _ in self.actions]
        self.carried: list[tuple[int, int]] = []

    def run(self) -> list[float]:
        """When each action ends; infinity for all if the order can't be kept."""
        ends = [inf for _ in self.actions]
        left = set(range(len(self.actions)))
        while left:
            number, prefer = min(left, key=self._ready.__getitem__), self.prefer
            soonest = max(self._device, self._ready[number])
            if prefer is not None and prefer in left and self._ready[prefer] <= soonest:
                number = prefer
            if self._ready[number] == inf:  # all wait for collectives that the link has yet to carry
                if not self._waiting:
                    return [inf for _ in ends]
                self._carry_next()
                continue
            end = self._go_on(number)
            if end is not None:
                ends[number] = end
                left.remove(number)
                self._is_done[number] = True
        while self._waiting:
            self._carry_next()
        return ends

    def run_pair(self) -> PairRun:
        """Run both actions."""
        end, other = self.run()
        return PairRun((end, other), tuple(self.carried), self.prefer, self._link)

    def _go_on(self, number: int) -> float | None:
        """Let an action use the device until it has to wait. Returns when it has ended, if it has."""
        now = max(self._device, self._ready[number])
        segments = self.actions[number]
        for place in range(self._places[number], len(segments)):
            compute, start, wait = segments[place]
            now += compute
            if start is not None:
                self._start(number, now, start)
            if wait is not None and self._ends[number].get(wait, inf) > now:
                self._carry_until(now)
                if self._ends[number].get(wait, inf) > now:
                    self._ready[number] = self._ends[number].get(wait, inf)
                    self._awaited[number] = wait
                    self._places[number] = place + 1
                    self._device = now
                    return None
            prefer = self.prefer  # it gets the device if it could use it now
            gives_way = prefer is not None and not self._is_done[prefer] and self._ready[prefer] <= now
            if gives_way and prefer != number and place + 1 < len(segments):
                self._ready[number] = self._device = now
                self._places[number] = place + 1
                return None
        self._device = now
        return now

    def _start(self, number: int, now: float, takes: float) -> None:
        self._started[number].append((now, takes))
        if self.order is None:
            self._carry_until(now)
            self._waiting.append((number, len(self._started[number]) - 1))
            return
        while len(self.carried) < len(self.order):
            action, collective = self.order[len(self.carried)]
            if collective >= len(self._started[action]):
                return
            self._carry(action, collective)

    def _carry_until(self, now: float) -> None:
        """Without an order: carry all collectives that the link has begun by now."""
        while self._waiting and self._link <= now:
            self._carry_next()

    def _carry_next(self) -> None:
        mine = [one for one in self._waiting if one[0] == self.link_prefer]
        chosen = (mine or self._waiting)[0]
        self._waiting.remove(chosen)
        self._carry(*chosen)

    def _carry(self, action: int, collective: int) -> None:
        started, takes = self._started[action][collective]
        self._link = self._ends[action][collective] = max(self._link, started) + takes
        self.carried.append((action, collective))
        if self._awaited[action] == collective:
            self._ready[action] = self._link

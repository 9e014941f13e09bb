"""Pairs: two actions of a rank that run at once, so that the collectives of one hide behind the compute of the other.

    batches 1 and 2 of their shapes   by turns; each action's collectives and times are recorded in the second
    before batch 3                    one rank of each cube plans in which order collectives go on the wire
    from then on                      each action goes on as soon as it can; the link keeps to the plan

By turns and planned, all ranks of a cube give their links the same collectives in the same order, whatever their
clocks say.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar

import torch

from lightning_hanayo.overlap.link_queue import LinkQueue, Recording
from lightning_hanayo.overlap.pair_time import PairRun, Segments, best_order
from lightning_hanayo.overlap.turns import ActionState
from lightning_hanayo.pipeline_parallel.capture.threads import ThreadState
from lightning_hanayo.schedule import Action, Kind
from lightning_hanayo.seeds import mix

T = TypeVar("T")
RECORDED = 2
"""the batch that is recorded, counted from 1: in the first one layers don't know yet which weights come next"""

MAX_SIGNATURES = 64
"""how many signatures' plans are kept: those of the latest batches"""
SIMULATED, LEAST_TRIES, TRIES_PER_PLACE = 2_500_000, 500, 20
"""collectives that are simulated while orders are tried, for all kinds of pairs together: a few seconds for the first
signature, half of that for the second, and so on; and the numbers of orders for each kind: the least, and the most for
each collective and each place that it may have"""

_Pair = tuple[Action, Action]


class PairedKind(NamedTuple):
    """The kind of an action in a pair: all of a kind start the same collectives."""

    stage: int
    kind: Kind
    is_edge: bool
    """whether it is the stage's first or last of this kind (`Program.edges`)"""


Plans = dict[tuple[PairedKind, PairedKind], PairRun]


@dataclass(eq=False, repr=False)
class Pairs:
    """Runs the pairs of one rank."""

    queue: LinkQueue
    """through which all collectives of the actions go"""
    states: InitVar[Sequence[ActionState]]
    """of the action that has the device"""
    share: Callable[[Plans | None], Plans] | None
    """returns the plans of the first rank of the cube on all of its ranks, which call it together"""
    _: KW_ONLY
    trained: Callable[[], int] = lambda: 0
    """a number that tells which parameters are trained: actions start no collectives for others"""
    is_first: bool
    """whether this is that rank"""
    is_planned: bool = True
    """whether collectives may go in a planned order; else actions always take turns"""

    def __post_init__(self, states: Sequence[ActionState]) -> None:
        self.queue.turns.states = states
        self._seen: dict[int, int] = {}
        """how many batches, by their signature"""
        self.plans: dict[int, Plans] = {}
        """by signature: how the pairs of such batches are expected to run"""
        self.segments: dict[PairedKind, Segments] = {}
        """of each kind of action, as the first rank has recorded them"""
        self._signature = 0
        self._edges: Collection[Action] = frozenset()
        self._recorded: dict[int, dict[PairedKind, Segments]] = {}
        """by signature: of batches that were recorded, until the next one with their signature; empty on other ranks"""
        self._active: list[tuple[PairedKind, Recording]] | None = None
        """of the latest batch, if it is recorded"""

    def close(self) -> None:
        """End the threads. They begin anew if another batch comes."""
        self.queue.close()

    def abandon(self) -> None:
        """After a failure: let nothing wait for collectives under way."""
        self.share = None  # it holds a process group, which other ranks wait to see closed
        self.queue.cancel()
        self.queue.close(timeout=0)

    def begin_batch(self, signature: int, pairs: Sequence[_Pair], edges: Collection[Action] = frozenset()) -> None:
        """A batch begins whose program has these pairs and `edges`. Called by all ranks of the cube.

        Batches with the same `signature` have the same shapes. Parts of a batch without pairs don't count.
        """
        if not pairs:
            return
        if self._active is not None:
            self._recorded[self._signature] = typical_segments(self._active) if self.is_first else {}
            self._active = None
        signature = mix(signature, self.trained())
        self._signature, self._edges = signature, edges
        self._seen[signature] = self._seen.pop(signature, 0) + 1  # the latest is the last one
        if signature in self._recorded:
            segments, made = self._recorded.pop(signature), None
            if self.is_first:
                self.segments = segments
                made = make_plans(pairs, segments, edges, SIMULATED // (1 + len(self.plans)))
            assert self.share is not None, "a run that has failed trains no more"
            self.plans[signature] = self.share(made)
        if self._seen[signature] == RECORDED and self.is_planned:
            self._active = []
        if len(self._seen) > MAX_SIGNATURES:
            oldest = next(iter(self._seen))
            for known in (self._seen, self.plans, self._recorded):
                known.pop(oldest, None)

    def run(
        self, first: Action, run_first: Callable[[], T], second: Action, run_second: Callable[[], T]
    ) -> tuple[T, T]:
        """Run both actions, and return their results."""
        kinds = kinds_of(first, second, self._edges)
        plan = self.plans.get(self._signature, {}).get(kinds)
        queue, state = self.queue, ThreadState.current()

        def act(slot: int, run: Callable[[], T]) -> T:
            recording = None
            if self._active is not None:
                recording = queue.record(slot)
                self._active.append((kinds[slot], recording))
            with torch.autograd.set_multithreading_enabled(False):  # a device's thread would run one of both at a time
                result = run()
            if recording is not None:
                recording.add()
            queue.check_action(slot)
            return result

        def act_second() -> T:
            with state.applied():
                return act(1, run_second)

        queue.begin_pair(None if plan is None else plan.order)
        try:
            how: Any = {"by_turns": plan is None, "prefer": plan and plan.prefer}
            return queue.turns.run(lambda: act(0, run_first), act_second, **how)
        finally:
            queue.end_pair()


def typical_segments(recorded: Collection[tuple[PairedKind, Recording]]) -> dict[PairedKind, Segments]:
    """The segments of each kind of action: each takes the median of its times over micro-batches.

    Kinds of which not all micro-batches do the same are left out.
    """
    alike: defaultdict[PairedKind, list[Segments]] = defaultdict(list)
    for kind, recording in recorded:
        alike[kind].append(recording.segments())
    typical: dict[PairedKind, Segments] = {}
    for kind, several in alike.items():
        shapes = {tuple((one.start is None, one.wait) for one in segments) for segments in several}
        if len(shapes) == 1:
            typical[kind] = [
                same[0]._replace(
                    compute=median(one.compute for one in same),
                    start=None if same[0].start is None else median(one.start or 0.0 for one in same),
                )
                for same in zip(*several, strict=True)
            ]
    return typical


def make_plans(
    pairs: Sequence[_Pair],
    segments: Mapping[PairedKind, Segments],
    edges: Collection[Action] = frozenset(),
    simulated: int = SIMULATED,
) -> Plans:
    """The order of the collectives of each kind of pair; none where its actions aren't recorded.

    `simulated`: how many collectives are simulated at most, but for the least number of orders.
    """
    plans: Plans = {}
    kinds = dict.fromkeys(kinds_of(first, second, edges) for first, second in pairs)
    for first, second in kinds:
        if first in segments and second in segments:
            both = segments[first], segments[second]
            collectives = sum(one.start is not None for own in both for one in own)
            tries = min(TRIES_PER_PLACE * collectives**2, simulated // (len(kinds) * max(1, collectives)))
            plans[first, second] = best_order(*both, max(LEAST_TRIES, tries))
    return plans


def kinds_of(first: Action, second: Action, edges: Collection[Action] = frozenset()) -> tuple[PairedKind, PairedKind]:
    """The kinds of a pair's actions."""
    one, other = (PairedKind(each.stage, each.kind, each in edges) for each in (first, second))
    return one, other

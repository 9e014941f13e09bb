"""SchedulingProblem: the sizes, costs and activation limit for which a search orders actions, as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.table import Action, Kind, Table


@dataclass(frozen=True, slots=True)
class SchedulingProblem:
    """Actions have the codes of `Evaluator`: (kind S + stage) B + micro-batch, the kinds F, I, W."""

    stage_ranks: tuple[int, ...]
    num_microbatches: int
    times: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    """of each stage's F, I and W"""
    hops: tuple[float, ...]
    """the time of a message from stage s to s + 1 or back; 0 within a rank"""
    capacity: int
    """the most activations a rank may hold, counted in stages"""
    split: bool = True
    """whether a backward has two parts; else I is the whole backward, and there is no W"""
    forwards_first: bool = False
    """whether the last stage's first backward waits for all forwards, for a loss of all micro-batches together"""

    @classmethod
    def of(
        cls, shape: Table, costs: CostModel, budget: float, split: bool = True, *, forwards_first: bool = False
    ) -> "SchedulingProblem":
        """The problem of ordering the actions of `shape` within `budget` M_a. The actions it has don't matter."""
        ranks, stages = shape.stage_ranks, range(shape.num_stages)

        def times(kind: Kind) -> tuple[float, ...]:
            return tuple(costs.of(shape, Action(stage, kind, 0)) for stage in stages)

        hops = (0.0 if here == there else costs.hop(shape, s) for s, (here, there) in enumerate(pairwise(ranks)))
        capacity = int(min(budget, shape.num_microbatches) * len(shape.stages_of(0)) + 1e-9)
        kinds = times(Kind.F), times(Kind.I if split else Kind.B), times(Kind.W)
        return cls(ranks, shape.num_microbatches, kinds, tuple(hops), capacity, split, forwards_first)

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.stage_ranks) + 1

    @property
    def num_stages(self) -> int:
        """Stages."""
        return len(self.stage_ranks)

    @property
    def num_actions(self) -> int:
        """Actions on all ranks. The effort of one run of the list scheduler is proportional to it."""
        return (2 + self.split) * self.num_stages * self.num_microbatches

    def rows(self, keys: Sequence[float]) -> list[list[int]]:
        """Each rank's codes in the order of their keys. `keys` has one entry per code, of the first kinds or of all."""
        rows: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for code in range(len(keys)):
            rows[self.stage_ranks[code // self.num_microbatches % self.num_stages]].append(code)
        for row in rows:
            row.sort(key=keys.__getitem__)
        return rows


class Budget:
    """The activations that one rank holds, counted in stages, at most `capacity`.

    A micro-batch needs memory for all of a rank's stages before its backward frees any of it. So memory is reserved for
    the oldest micro-batch first, then for the next; each may count on the memory that the older ones will free:

        capacity 4, two stages per rank         held + still needed by m, and held by the younger ones
          m = 0 holds 1, needs 1                1 + 1 + 2 = 4    fits
          m = 1 holds 2                         2 + 0     = 2    fits;  so m = 2 must wait: m = 0 would get none

    So the oldest micro-batch can always go on, on every rank, and no rank waits for memory forever.
    """

    __slots__ = ("_capacity", "_oldest_growing", "_held", "_held_by_older", "_needed", "total")

    def __init__(self, capacity: int, num_stages: int, num_microbatches: int) -> None:
        self._capacity = capacity
        self._held = [0] * num_microbatches
        self._needed = [num_stages] * num_microbatches
        self.total = 0
        self._oldest_growing = 0
        self._held_by_older = 0  # by micro-batches before `_oldest_growing`, which have run all their forwards

    def allows(self, microbatch: int) -> bool:
        """Whether the rank may run one more forward of `microbatch`."""
        room = self._capacity - self.total - 1
        if room < 0:
            return False
        room += self._held_by_older
        for older in range(self._oldest_growing, microbatch):
            if self._needed[older] > room:
                return False
            room += self._held[older]
        return True

    def take(self, microbatch: int) -> None:
        """Count a forward of `microbatch`."""
        self.total += 1
        self._held[microbatch] += 1
        self._needed[microbatch] -= 1
        while self._oldest_growing < len(self._needed) and not self._needed[self._oldest_growing]:
            self._held_by_older += self._held[self._oldest_growing]
            self._oldest_growing += 1

    def free(self, microbatch: int) -> None:
        """Count a `B` or `W` of `microbatch`, which frees an activation."""
        self.total -= 1
        self._held[microbatch] -= 1
        if microbatch < self._oldest_growing:
            self._held_by_older -= 1

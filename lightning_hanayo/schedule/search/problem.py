"""SchedulingProblem: the sizes, costs and activation limit for which a search orders actions, as numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.table import Table


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

    @classmethod
    def of(cls, shape: Table, costs: CostModel, budget: float, split: bool = True) -> "SchedulingProblem":
        """The problem of ordering the actions of `shape` within `budget` M_a. The actions it has don't matter."""
        ranks, stages = shape.stage_ranks, range(shape.num_stages)

        def times(kind: Kind) -> tuple[float, ...]:
            return tuple(costs.of(shape, Action(stage, kind, 0)) for stage in stages)

        hops = (0.0 if here == there else costs.hop(shape, s) for s, (here, there) in enumerate(pairwise(ranks)))
        capacity = int(min(budget, shape.num_microbatches) * len(shape.stages_of(0)) + 1e-9)
        kinds = times(Kind.F), times(Kind.I if split else Kind.B), times(Kind.W)
        return cls(ranks, shape.num_microbatches, kinds, tuple(hops), capacity, split)

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

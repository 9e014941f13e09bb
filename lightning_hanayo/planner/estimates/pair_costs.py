"""Costs of a schedule whose ranks run two actions at once, as the machine runs them.

Processes on CPUs plan the order of collectives. On GPUs both actions put their work into one stream, and take turns.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from typing_extensions import override

from lightning_hanayo.overlap.pair_time import Segment, best_order, run_by_turns
from lightning_hanayo.schedule import Action, CostModel
from lightning_hanayo.schedule.table import Table

_OVERHEAD = 1.03
"""what a pair takes of what is simulated: measured 0.99 to 1.04, once 1.07 (docs/benchmarks/pairs.md)"""
_TRIES = 20
"""orders of collectives that are tried, in each of many layouts: a run tries tens of thousands, and takes up to 8 %
less than predicted (mesh 4,2,1 of the benchmark)"""


@dataclass(frozen=True)
class PairCosts(CostModel):
    """Costs whose pairs run in the best order of collectives."""

    takes_turns: ClassVar[bool] = False

    @override
    def pair(self, table: Table, first: Action, second: Action) -> tuple[float, float]:
        return pair_ends(self.segments_of(table, first), self.segments_of(table, second), self.takes_turns)


@dataclass(frozen=True)
class TurnCosts(PairCosts):
    """Costs whose pairs take turns."""

    takes_turns: ClassVar[bool] = True


@lru_cache(maxsize=10_000)
def pair_ends(first: tuple[Segment, ...], second: tuple[Segment, ...], takes_turns: bool, /) -> tuple[float, float]:
    """Seconds until each of two actions has ended that begin at once."""
    run = run_by_turns(first, second) if takes_turns else best_order(first, second, _TRIES)
    return _OVERHEAD * run.ends[0], _OVERHEAD * run.ends[1]

"""Combines all ranks' records of a run, to and from JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from recipes.benchmarks.checkpoints.rank import Load, RankRecord, Save
from recipes.benchmarks.harness import Summary


@dataclass(frozen=True)
class SaveFigures:
    """A way to save, in seconds and bytes. Each round counts the slowest rank; memory is the most of any rank."""

    name: str
    blocked: Summary
    whole: Summary
    added: Summary
    memory: int
    written: int

    @staticmethod
    def of(name: str, ranks: Sequence[Sequence[Save]]) -> "SaveFigures":
        """Combine the ranks' saves."""
        rounds = list(zip(*ranks, strict=True))
        return SaveFigures(
            name,
            Summary.of([max(save.blocked for save in saves) for saves in rounds]),
            Summary.of([max(save.whole for save in saves) for saves in rounds]),
            Summary.of([max(save.added for save in saves) for saves in rounds]),
            max(save.memory for saves in rounds for save in saves),
            max(save.written for saves in rounds for save in saves),
        )


@dataclass(frozen=True)
class LoadFigures:
    """A way to load, in seconds and bytes."""

    name: str
    cold: Summary
    warm: Summary
    memory: int
    equal: bool
    """whether all ranks got the saved values each time, bit for bit"""

    @staticmethod
    def of(name: str, ranks: Sequence[Sequence[Load]]) -> "LoadFigures":
        """Combine the ranks' loads."""
        rounds = list(zip(*ranks, strict=True))
        return LoadFigures(
            name,
            Summary.of([max(load.cold for load in loads) for loads in rounds]),
            Summary.of([max(load.warm for load in loads) for loads in rounds]),
            max(load.memory for loads in rounds for load in loads),
            all(load.equal for loads in rounds for load in loads),
        )


@dataclass(frozen=True)
class CaseFigures:
    """All figures of one number of ranks."""

    num_ranks: int
    num_bytes: int
    """of all ranks' tensors"""
    step: float
    """an ordinary step, in seconds"""
    saves: tuple[SaveFigures, ...]
    loads: tuple[LoadFigures, ...]

    @staticmethod
    def combined(ranks: Sequence[RankRecord]) -> "CaseFigures":
        """Combine all ranks' records."""
        ordinary = [save.step for record in ranks for saves in record.saves.values() for save in saves]
        return CaseFigures(
            len(ranks),
            sum(record.num_bytes for record in ranks),
            Summary.of(ordinary).median,
            tuple(SaveFigures.of(name, [record.saves[name] for record in ranks]) for name in ranks[0].saves),
            tuple(LoadFigures.of(name, [record.loads[name] for record in ranks]) for name in ranks[0].loads),
        )

    @staticmethod
    def of(data: Mapping[str, Any]) -> "CaseFigures":
        """From JSON."""
        saves = tuple(SaveFigures(**_summaries(one, "blocked", "whole", "added")) for one in data["saves"])
        loads = tuple(LoadFigures(**_summaries(one, "cold", "warm")) for one in data["loads"])
        return CaseFigures(**{**data, "saves": saves, "loads": loads})

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _summaries(data: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {**data, **{name: Summary(**data[name]) for name in names}}

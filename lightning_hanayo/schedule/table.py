"""Table: which compute actions each pipeline rank runs, in which order. The data of a schedule."""

from dataclasses import dataclass
from functools import cached_property

from lightning_hanayo.schedule.action import Action


@dataclass(frozen=True)
class Table:
    """The data of a schedule. `Schedule` adds reading and writing of CSV files; builders return a `Schedule`."""

    name: str
    stage_ranks: tuple[int, ...]
    """the pipeline rank of each stage"""
    actions: tuple[tuple[Action, ...], ...]
    """compute only, one tuple per pipeline rank"""
    num_microbatches: int
    loss_stage: bool = False
    """whether the last stage holds only head and loss (see `with_loss_stage`)"""
    reduction_order: tuple[int, ...] = ()
    """the order of stages in which all ranks start their gradient reductions; empty: as the gradients are ready"""
    pairs: frozenset[tuple[Action, Action]] = frozenset()
    """actions of two micro-batches that a rank works on at once: neighbours in its row, in this order"""

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages, the loss stage included."""
        return len(self.stage_ranks)

    @cached_property
    def partner_of(self) -> dict[Action, Action]:
        """For the first action of each pair the second."""
        return dict(self.pairs)

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in self.actions]
        for stage, rank in enumerate(self.stage_ranks):
            held[rank].append(stage)
        return tuple(map(tuple, held))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on pipeline rank `rank`, ascending."""
        return self._stages[rank]

    def share_of(self, stage: int) -> float:
        """The part of its rank's share of the model that `stage` holds: 1/(stages per rank), 0 for the loss stage."""
        if self.loss_stage and stage == self.num_stages - 1:
            return 0.0
        rank = self.stage_ranks[stage]
        has_loss = self.loss_stage and self.stage_ranks[-1] == rank
        return 1 / (len(self._stages[rank]) - has_loss)

"""Schedule: a table of compute actions, one list per pipeline rank. Data only; the runtime plays it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lightning_hanayo.schedule.action import Action


@dataclass(frozen=True)
class Schedule:
    """Which compute actions each pipeline rank runs, in which order.

    Example:
        >>> schedule = build("1f1b", num_ranks=2, num_microbatches=2)
        >>> [str(action) for action in schedule.actions[1]]
        ['1F0', '1B0', '1F1', '1B1']
    """

    name: str
    stage_ranks: tuple[int, ...]
    """the pipeline rank of each stage"""
    actions: tuple[tuple[Action, ...], ...]
    """compute only, one tuple per pipeline rank"""
    num_microbatches: int
    loss_stage: bool = False
    """whether the last stage holds only head and loss (see `with_loss_stage`)"""
    replica_of: tuple[int, ...] = ()
    """for each stage its twin, where the model is there twice (chimera): stages 0..S/2-1 are one chain, the others its
    copy, and a micro-batch visits one of the two; empty: no stage has a twin"""
    reduction_order: tuple[int, ...] = ()
    """the stages in the order in which all ranks start their gradient reductions; empty: as they are done"""

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages, the loss stage included."""
        return len(self.stage_ranks)

    @property
    def num_chains(self) -> int:
        """Copies of the model, each a chain of stages."""
        return 2 if self.replica_of else 1

    @property
    def chain_length(self) -> int:
        """Stages that a micro-batch visits."""
        return self.num_stages // self.num_chains

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
        """The part of its rank's share of the model that `stage` holds: 1/(stages per rank), 0 for the loss stage.

        Of a rank's share in each copy of the model: a rank that holds a stage and another one's twin holds two shares.
        """
        if self.loss_stage and stage == self.num_stages - 1:
            return 0.0
        rank, length = self.stage_ranks[stage], self.chain_length
        has_loss = self.loss_stage and self.stage_ranks[-1] == rank
        return 1 / (sum(other // length == stage // length for other in self._stages[rank]) - has_loss)

    def to_csv(self, path: str | Path, communication: bool = False) -> None:
        """Write the table torch.distributed.pipelining reads: a row per rank, a cell per action.

        Args:
            path: the file to write.
            communication: write the completed table (torch's `compute_comms` format) instead of the compute alone.
                Receives stand ahead of the sends they match, so who plays that table must post them without blocking.
                torch's own runtime adds the communication itself: give it the compute alone.

        Raises:
            HanayoError: the file can't be written.
        """
        from lightning_hanayo.schedule.passes.communication import complete
        from lightning_hanayo.schedule.text.csv_table import write_csv

        write_csv(path, complete(self) if communication else self.actions)

    @classmethod
    def from_csv(cls, path: str | Path) -> "Schedule":
        """Read a table: a row per rank; an empty cell is idle; communication cells are dropped, `complete` makes them.

        The name is the file's; which rank holds a stage is told by where its actions stand. So a chain that no
        micro-batch visits (chimera's second, for one micro-batch) leaves no trace in a file and doesn't come back.

        Raises:
            HanayoError: the file is no table, or the table is no schedule; the message draws it and marks the cell.
        """
        from lightning_hanayo.schedule.text.csv_table import read_csv

        return read_csv(path)

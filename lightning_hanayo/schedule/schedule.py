"""Schedule: the result of `build`, which the runtime runs. A table that can be read from and written to CSV files."""

from dataclasses import dataclass
from pathlib import Path

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.communication import complete
from lightning_hanayo.schedule.passes.validation import validate
from lightning_hanayo.schedule.table import Table
from lightning_hanayo.schedule.text import locate_error, read_table, write_rows


@dataclass(frozen=True)
class Schedule(Table):
    """Which compute actions each pipeline rank runs, in which order.

    Example:
        >>> schedule = build("1f1b", num_ranks=2, num_microbatches=2)
        >>> [str(action) for action in schedule.actions[1]]
        ['1F0', '1B0', '1F1', '1B1']
    """

    def to_csv(self, path: str | Path, communication: bool = False) -> None:
        """Write the table in the format of torch.distributed.pipelining: a row per rank, a cell per action or pair.

        Args:
            path: the file to write.
            communication: also write sends, receives and gradient reductions (torch's `compute_comms` format).
                A send and its receive may hold up both ranks: no rank waits for one that waits for it. torch's own
                runtime adds the communication itself: give it the compute actions alone.

        Raises:
            HanayoError: the file can't be written.
        """
        write_rows(path, complete(self) if communication else self.actions, self.pairs)

    @classmethod
    def from_csv(cls, path: str | Path) -> "Schedule":
        """Read and validate a table: a row per rank. An empty cell is idle. Communication cells are dropped: where a
        message is sent and received follows from the compute actions (`complete`).

        The schedule's name is the file's. A stage is on the rank in whose row its actions are.

        Raises:
            HanayoError: the file is no table, or the table can't run; the message draws it and marks the cell.
        """
        path = Path(path)
        all_rows, pairs = read_table(path)
        rows = [tuple(action for action in row if action.kind.is_compute) for row in all_rows]
        found = [(action, rank) for rank, row in enumerate(rows) for action in row]
        if not found:
            raise HanayoError(f"{path} holds no action; expected a row per rank with cells like 0F0, 3B2")
        ranks = {action.stage: rank for action, rank in reversed(found)}  # the first; validation rejects a second
        missing = next((stage for stage, held in enumerate(sorted(ranks)) if stage != held), None)
        if missing is not None:
            raise HanayoError(f"{path} has stages up to {max(ranks)} but no action of stage {missing}")
        schedule = cls(
            name=path.stem,
            stage_ranks=tuple(ranks[stage] for stage in range(len(ranks))),
            actions=tuple(rows),
            num_microbatches=1 + max(action.microbatch or 0 for action, _ in found),
            pairs=pairs,
        )
        try:
            validate(schedule)
        except HanayoError as error:
            raise locate_error(path, error) from None
        return schedule

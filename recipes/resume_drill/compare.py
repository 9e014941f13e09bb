"""Compares a training that was killed and resumed with one that nothing has disturbed."""

from dataclasses import dataclass
from pathlib import Path

from lightning_hanayo.dist_checkpointing.compare import compare
from recipes.resume_drill.train import BATCHES, CHECKPOINTS, DATA

_COMPARED = ("state_dict/", "optimizer_states/", "lr_schedulers/", "global_step", "epoch")
"""what must be equal; the rest has names of folders and counts of tries"""


@dataclass(frozen=True)
class Comparison:
    """What was compared, and what differs.

    Args:
        num_tensors: entries of the model and of the optimizers that were compared.
        num_batches: batches, over all data ranks.
        repeated: batches that were trained on once more, since the checkpoint was older.
        different: names of entries, and steps with other batches.
    """

    num_tensors: int
    num_batches: int
    repeated: int
    different: tuple[str, ...]


def compare_runs(undisturbed: Path, disturbed: Path) -> Comparison:
    """Compare last checkpoints, bit by bit, and the batches of each step in each data rank.

    Raises:
        CheckpointError: a checkpoint isn't whole.
    """
    paths = (str(folder / CHECKPOINTS / "last.ckpt") for folder in (undisturbed, disturbed))
    entries = [entry for entry in compare(*paths) if entry.name.startswith(_COMPARED)]
    different = [entry.name for entry in entries if entry.what]
    num_batches = repeated = 0
    for data_rank in range(DATA):
        once, often = (_batches(folder / f"{BATCHES}-{data_rank}") for folder in (undisturbed, disturbed))
        num_batches, repeated = num_batches + len(once), repeated + len(often) - len(set(often))
        different += [f"batch {step} of data rank {data_rank}" for step, _ in sorted(set(once) ^ set(often))]
    return Comparison(len(entries), num_batches, repeated, tuple(different))


def _batches(file: Path) -> list[tuple[int, int]]:
    """Step and hash of each batch."""
    lines = [line.split() for line in file.read_text().splitlines()]
    return [(int(line[0]), int(line[1])) for line in lines if len(line) == 2]  # a kill may cut a line

"""Verifies a checkpoint on all ranks together: each hashes its share, and all hear what one has found."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from lightning_hanayo.checkpoint.format.header import ITEM_BYTES
from lightning_hanayo.checkpoint.load.folder import CheckpointFolder
from lightning_hanayo.errors import CheckpointError


def verify_on_all_ranks(
    folder: CheckpointFolder, rank: int, num_ranks: int, gather: Callable[[str | None], list[Any]]
) -> None:
    """Read every byte of a checkpoint once, divided among the ranks, and compare the hashes. Called by all ranks.

    Args:
        gather: returns the argument of each rank, in their order.

    Raises:
        CheckpointError: the first that a rank has found, in the order of the files; the same on all ranks.
    """
    problem = None
    try:
        for file, keys in share(folder, rank, num_ranks).items():
            folder.verify_file(file, keys)
    except CheckpointError as error:
        problem = str(error)
    found = [one for one in gather(problem) if one is not None]
    if found:
        raise CheckpointError(found[0])


def share(folder: CheckpointFolder, rank: int, num_ranks: int) -> dict[str, set[str]]:
    """Returns what one rank verifies: files, and the keys of tensors in each of them.

    All of them stand in a row, file after file, and a rank takes what begins in its part of the row. Whoever takes
    tensors of a file verifies its header, too.
    """
    total = sum(num_bytes for _, _, num_bytes in _row(folder)) or 1
    taken: dict[str, set[str]] = defaultdict(set)
    position = 0
    for file, key, num_bytes in _row(folder):
        if position * num_ranks // total == rank:
            taken[file] |= set() if key is None else {key}
        position += num_bytes
    return taken


def _row(folder: CheckpointFolder) -> Iterator[tuple[str, str | None, int]]:
    """Each file, and then each tensor in it by key, with its bytes."""
    for file, stored in folder.manifest.files.items():
        parts = folder.parts.get(file, {})
        sizes = {key: of.part.region.num_entries * ITEM_BYTES[of.tensor.dtype] for key, of in parts.items()}
        yield file, None, max(1, stored.num_bytes - sum(sizes.values()))
        for key, num_bytes in sizes.items():
            yield file, key, num_bytes

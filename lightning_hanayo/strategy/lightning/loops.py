"""All ranks ask for the same number of loaders, or the run ends with an error that says which rank has how many.

rank 0   val_dataloader() -> [a, b]      2 and 1: an error on both ranks, before Lightning adds up the lengths of b
rank 1   val_dataloader() -> a
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader

from lightning_hanayo.errors import HanayoError, listed
from lightning_hanayo.runtime.comm.object_collectives import all_gather_objects
from lightning_hanayo.strategy.process_groups import ProcessGroups
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def agree_on_counts(
    trainer: "pl.Trainer", attributes: TemporaryAttributes, rank: int, get_groups: Callable[[], ProcessGroups]
) -> None:
    """Compare the numbers of loaders whenever a loop asks for its loaders. Called by all ranks of several.

    Args:
        trainer: whose loops ask.
        attributes: restored at the end of the run.
        rank: this process's, in the world.
        get_groups: returns its process groups. None is kept: it would outlive a failure.
    """
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in (*loops, trainer.predict_loop):
        source = loop._data_source
        attributes.set(source, "dataloader", partial(_request, source.dataloader, source.name, rank, get_groups))


def check_counts(name: str, counts: dict[int, int]) -> None:
    """Check that all ranks have the same number of loaders. `counts`: by rank.

    Raises:
        HanayoError: they don't.
    """
    if len(set(counts.values())) > 1:
        found = listed([f"{count} on rank {rank}" for rank, count in sorted(counts.items())], 4)
        raise HanayoError(
            f"{name} gives ranks different numbers of loaders: {found}. All ranks go through the loaders together: "
            f"return as many on each rank, whatever data they read."
        )


def _request(request: Callable[[], Any], name: str, rank: int, get_groups: Callable[[], ProcessGroups]) -> Any:
    """Lightning's request for loaders, and the check."""
    loaders = request()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    check_counts(name, _of_all_ranks(rank, len(combined.flattened), get_groups))
    return loaders


def _of_all_ranks(rank: int, count: int, get_groups: Callable[[], ProcessGroups]) -> dict[int, int]:
    """Each rank's count: first those of the ranks that share this one's data, then those of all data ranks."""
    counts = {rank: count}
    for axis in ("replica", "data_control"):
        if (group := getattr(get_groups(), axis)) is not None:
            gathered = all_gather_objects(group, counts)
            counts = {rank: count for part in gathered for rank, count in part.items()}
    return counts

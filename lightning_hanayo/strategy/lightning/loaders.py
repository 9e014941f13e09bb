"""The data loaders: pipeline rank 0 reads the user's, the ranks above it get as many placeholders."""

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.comm.relay import Relay

_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)
"""samplers that give as many indices as their length says"""


class PlaceholderBatch(dict[str, Any]):
    """Stands for a batch on pipeline ranks above 0, where nobody needs its data."""

    def __init__(self, *_: Any) -> None:
        super().__init__(placeholder=torch.zeros(1))

    def __missing__(self, key: Any) -> NoReturn:
        raise _without_data(f"batch[{key!r}] was read")

    def __iter__(self) -> NoReturn:
        raise _without_data("the batch was unpacked")


def _without_data(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} on a pipeline rank above 0, which gets no data. Hooks and callbacks that look into batches must do so "
        f"where `trainer.is_global_zero`, or in the step itself."
    )


ChainOf = Callable[[], Relay]
"""Returns the pipeline's chain. Loaders may be asked for, and for their length, before the pipeline is there."""
CubeOf = Callable[[], dist.ProcessGroup]
"""Returns the ranks of the cube."""


class _Walker:
    def __init__(self, loader: Any, chain_of: ChainOf) -> None:
        self.loader = loader
        self._chain_of = chain_of

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_chain_of", "_cube_of") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)  # state_dict, sampler, set_epoch: whatever Lightning asks a loader for

    def __len__(self) -> int:
        length = sized_len(self.loader)
        if length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return length


class PlaceholderLoader(_Walker):
    """Placeholder batches on the ranks above 0: as many as the user's loader has, or as rank 0 announces."""

    def __iter__(self) -> Iterator[PlaceholderBatch]:
        if _is_length_certain(self.loader):
            for _ in range(len(self)):
                yield PlaceholderBatch()
        else:
            chain = self._chain_of()
            while chain.share("data"):
                yield PlaceholderBatch()


class AnnouncingLoader(_Walker):
    """The user's loader on pipeline rank 0, where its length isn't certain: says whether there is one more batch."""

    def __iter__(self) -> Iterator[Any]:
        chain = self._chain_of()
        for batch in self.loader:
            chain.share("data", True)
            yield batch
        chain.share("data", False)


class CubeLoader(_Walker):
    """The user's loader on a cube of ranks: the first of them reads it, and gives each batch to the others."""

    def __init__(self, loader: Any, chain_of: ChainOf, cube_of: CubeOf) -> None:
        super().__init__(loader, chain_of)
        self._cube_of = cube_of

    def __iter__(self) -> Iterator[Any]:
        cube = self._cube_of()
        if cube.rank() == 0:
            for batch in self.loader:
                yield _share((batch,), cube)[0]
            _share((), cube)
        else:
            while batch := _share((), cube):
                yield batch[0]


def _share(value: tuple[Any, ...], cube: dist.ProcessGroup) -> Any:
    objects = [value]
    dist.broadcast_object_list(objects, group=cube, group_src=0)
    return value or objects[0]


def _is_length_certain(loader: Any) -> bool:
    """Whether the loader surely gives `len(loader)` batches: torch's own, with torch's samplers over a sized dataset.

    All else may end before its length, and Lightning then ends the epoch: a stream, a sampler or loader of the user's,
    one that is resumed in the middle.
    """
    if type(loader) is not DataLoader or isinstance(loader.dataset, IterableDataset):
        return False
    batches = loader.batch_sampler
    samplers = [loader.sampler] if batches is None else [loader.sampler, getattr(batches, "sampler", None)]
    return all(type(sampler) in _SAMPLERS for sampler in samplers) and type(batches) in (type(None), BatchSampler)


def process(loader: Any, chain_of: ChainOf, pipe_rank: int, cube_of: CubeOf | None = None) -> Any:
    """What a rank iterates over instead of the user's `loader`. `cube_of` is None without a cube."""
    if pipe_rank > 0:
        return PlaceholderLoader(loader, chain_of)
    shared = loader if cube_of is None else CubeLoader(loader, chain_of, cube_of)
    return shared if _is_length_certain(loader) else AnnouncingLoader(shared, chain_of)

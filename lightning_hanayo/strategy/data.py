"""The data loaders: pipeline rank 0 reads the user's, the ranks above it walk in step with a shadow of it."""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from torch.utils.data import IterableDataset

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.chain import Chain


class ShadowBatch(dict[str, Any]):
    """Stands for a batch on pipeline ranks above 0, where nobody needs its data."""

    def __init__(self, *_: Any) -> None:
        super().__init__(shadow=torch.zeros(1))

    def __missing__(self, key: Any) -> NoReturn:
        raise _without_data(f"batch[{key!r}] was read")

    def __iter__(self) -> NoReturn:
        raise _without_data("the batch was unpacked")


def _without_data(what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{what} on a pipeline rank above 0, which gets no data. Hooks and callbacks that look into batches must do so "
        f"where `trainer.is_global_zero`, or in the step itself."
    )


def _ends_unforeseen(loader: Any) -> bool:
    """Whether nobody knows where it ends: a stream's length is only a claim, a resumed loader begins anywhere."""
    stream = isinstance(getattr(loader, "dataset", None), IterableDataset)
    return sized_len(loader) is None or stream or hasattr(loader, "load_state_dict")


class _Walker:
    def __init__(self, loader: Any, chain: Chain) -> None:
        self.loader = loader
        self._chain = chain

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_chain", "_cube") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.loader, name)  # state_dict, sampler, set_epoch: whatever Lightning asks a loader for

    def __len__(self) -> int:
        length = sized_len(self.loader)
        if length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return length


class ShadowLoader(_Walker):
    """As many shadow batches as the user's loader has batches; an unforeseen end comes down the chain."""

    def __iter__(self) -> Iterator[ShadowBatch]:
        if not _ends_unforeseen(self.loader):
            for _ in range(len(self)):
                yield ShadowBatch()
        else:
            while self._chain.share("data"):
                yield ShadowBatch()


class AnnouncingLoader(_Walker):
    """The user's loader of unknown length on pipeline rank 0: tells the others whether there is one more batch."""

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self._chain.share("data", True)
            yield batch
        self._chain.share("data", False)


class CubeLoader(_Walker):
    """The user's loader on a cube of ranks: the first of them reads it, and gives each batch to the others."""

    def __init__(self, loader: Any, chain: Chain, cube: dist.ProcessGroup) -> None:
        super().__init__(loader, chain)
        self._cube = cube

    def __iter__(self) -> Iterator[Any]:
        if self._cube.rank() == 0:
            for batch in self.loader:
                yield self._share((batch,))[0]
            self._share(())
        else:
            while batch := self._share(()):
                yield batch[0]

    def _share(self, value: tuple[Any, ...]) -> Any:
        objects = [value]
        dist.broadcast_object_list(objects, group=self._cube, group_src=0)
        return value or objects[0]


def process(loader: Any, chain: Chain, pipe_rank: int, cube: dist.ProcessGroup | None = None) -> Any:
    """What a rank iterates over instead of the user's `loader`."""
    if pipe_rank > 0:
        return ShadowLoader(loader, chain)
    shared = loader if cube is None else CubeLoader(loader, chain, cube)
    return AnnouncingLoader(shared, chain) if _ends_unforeseen(loader) else shared

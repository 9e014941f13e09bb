"""The data loaders: pipeline rank 0 reads the user's, the ranks above it walk in step with a shadow of it."""

from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.data import sized_len

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.chain import Chain


class ShadowBatch(dict[str, Any]):
    """Stands for a batch on pipeline ranks above 0, where nobody needs its data."""

    def __init__(self, *_: Any) -> None:
        super().__init__(shadow=torch.zeros(1))

    def __missing__(self, key: Any) -> NoReturn:
        raise UnsupportedError(
            f"batch[{key!r}] was read on a pipeline rank above 0, which gets no data. Hooks and callbacks that look "
            f"into batches must do so where `trainer.is_global_zero`, or in the step itself."
        )


class ShadowLoader:
    """As many shadow batches as the user's loader has batches; the end of one without a length comes down the chain."""

    def __init__(self, loader: Any, chain: Chain) -> None:
        self.loader = loader
        self._chain = chain
        self._length = sized_len(loader)

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(f"{type(self.loader).__name__} has no length")
        return self._length

    def __iter__(self) -> Iterator[ShadowBatch]:
        if self._length is not None:
            for _ in range(self._length):
                yield ShadowBatch()
        else:
            while self._chain.share():
                yield ShadowBatch()


class AnnouncingLoader:
    """The user's loader of unknown length on pipeline rank 0: tells the others whether there is one more batch."""

    def __init__(self, loader: Any, chain: Chain) -> None:
        self.loader = loader
        self._chain = chain

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self._chain.share(True)
            yield batch
        self._chain.share(False)


def process(loader: Any, chain: Chain, pipe_rank: int) -> Any:
    """What a rank iterates over instead of the user's `loader`."""
    if pipe_rank > 0:
        return ShadowLoader(loader, chain)
    return loader if sized_len(loader) is not None else AnnouncingLoader(loader, chain)

"""The tensors that a rank saves, and the ways to save and load them. All ranks call each function."""

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from typing_extensions import override

from lightning_hanayo.dist_checkpointing.commit import RankPart, SavingRanks, TensorPart
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.save import Saver

BLOCKS = 8
"""in the whole model, divided among the ranks"""
ADAM = ("exp_avg", "exp_avg_sq")
_PARAMETERS = {
    "attention.qkv.weight": (3, 1),
    "attention.qkv.bias": (3,),
    "attention.out.weight": (1, 1),
    "attention.out.bias": (1,),
    "mlp.up.weight": (4, 1),
    "mlp.up.bias": (4,),
    "mlp.down.weight": (1, 4),
    "mlp.down.bias": (1,),
    "norm1.weight": (1,),
    "norm1.bias": (1,),
    "norm2.weight": (1,),
    "norm2.bias": (1,),
}
"""of a block, with their shapes in units of the width"""


@dataclass(frozen=True)
class Sizes:
    """The size of the model.

    Args:
        width: features of a block's input. A block has 12 width^2 weights, and Adam twice as many values.
    """

    width: int

    @staticmethod
    def of_bytes(num_bytes: float) -> "Sizes":
        """The model whose weights and Adam states together have about this size in fp32."""
        per_width = BLOCKS * 12 * (1 + len(ADAM)) * 4
        return Sizes(max(4, round(math.sqrt(num_bytes / per_width) / 4) * 4))

    def shapes(self, blocks: range) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors of some blocks, as our manifest names them."""
        for block in blocks:
            for parameter, units in _PARAMETERS.items():
                name, shape = f"blocks.{block}.{parameter}", tuple(unit * self.width for unit in units)
                yield f"model/{name}", shape
                yield from ((f"optimizer/0/{name}/{key}", shape) for key in ADAM)
                yield f"optimizer/0/{name}/step", ()


def blocks_of(rank: int, num_ranks: int) -> range:
    """The blocks that a rank holds.

    Example:
        >>> blocks_of(1, 4)
        range(2, 4)
    """
    return range(rank * BLOCKS // num_ranks, (rank + 1) * BLOCKS // num_ranks)


class State:
    """The tensors of one rank."""

    def __init__(self, sizes: Sizes, rank: int, num_ranks: int) -> None:
        random = torch.Generator().manual_seed(rank)
        self.tensors: Mapping[str, Tensor] = {
            name: torch.randn(shape, generator=random) for name, shape in sizes.shapes(blocks_of(rank, num_ranks))
        }

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def change(self) -> None:
        """Change all values in place, as an optimizer's step does."""
        for tensor in self.tensors.values():
            tensor.neg_()

    def spoil(self) -> None:
        """Overwrite all values, so that what a load leaves out is seen."""
        for tensor in self.tensors.values():
            tensor.fill_(math.nan)

    def digest(self) -> str:
        """A hash of all values."""
        state = xxhash.xxh3_128()
        for tensor in self.tensors.values():
            state.update(tensor.view(-1).numpy().data)
        return state.hexdigest()


Tensors = Mapping[str, Tensor]


class Way(ABC):
    """A way to save and load."""

    loads: tuple[str, ...] = ("",)
    """kinds of loading"""

    @abstractmethod
    def save(self, path: Path, tensors: Tensors) -> None:
        """Save; return when the tensors may be changed."""

    @abstractmethod
    def is_whole(self, path: Path) -> bool:
        """Whether the save is complete."""

    @abstractmethod
    def load(self, path: Path, tensors: Tensors, kind: str) -> None:
        """Replace the tensors' values by the saved ones."""

    def poll(self) -> None:  # noqa: B027 - only background saves have something to do
        """Begin a step."""

    def finish(self) -> None:  # noqa: B027
        """Wait for the save in the background."""


class Ours(Way):
    """The package's own format."""

    loads = ("verified", "sizes only")

    def __init__(self, group: dist.ProcessGroup, background: dist.ProcessGroup | None = None) -> None:
        self._peers = SavingRanks(group)
        self._saver = Saver(self._peers, None if background is None else SavingRanks(background))

    @override
    def save(self, path: Path, tensors: Tensors) -> None:
        parts = [
            TensorPart(name, tensor, tuple(tensor.shape), Region.whole(tensor.shape), _kind(name))
            for name, tensor in tensors.items()
        ]
        about = {"step": 1, "epoch": 0, "layout": {"pipe": self._peers.num_ranks}}
        self._saver.save(str(path), RankPart(parts, {}, about))

    @override
    def is_whole(self, path: Path) -> bool:
        return (path / "manifest.json").exists()

    @override
    def load(self, path: Path, tensors: Tensors, kind: str) -> None:
        folder = CheckpointFolder(str(path))
        if kind == "verified":
            folder.verify(self._peers.rank, self._peers.num_ranks)
            self._peers.all_gather(None)
        for name, tensor in tensors.items():
            tensor.copy_(folder.read(name))

    @override
    def poll(self) -> None:
        self._saver.poll()

    @override
    def finish(self) -> None:
        self._saver.finish()


class Torchs(Way):
    """torch.distributed.checkpoint, with its defaults."""

    def __init__(self, group: dist.ProcessGroup, *, in_background: bool) -> None:
        self._group, self._in_background = group, in_background
        self._saving: Future[Any] | None = None

    @override
    def save(self, path: Path, tensors: Tensors) -> None:
        if self._in_background:
            saving = async_save(dict(tensors), checkpoint_id=path, process_group=self._group)
            self._saving = cast("Future[Any]", saving)
        else:
            save(dict(tensors), checkpoint_id=path, process_group=self._group)

    @override
    def is_whole(self, path: Path) -> bool:
        return (path / ".metadata").exists()

    @override
    def load(self, path: Path, tensors: Tensors, kind: str) -> None:
        load(dict(tensors), checkpoint_id=path, process_group=self._group)

    @override
    def finish(self) -> None:
        if self._saving is not None:
            self._saving.result()


class OneFile(Way):
    """All tensors go to rank 0, which writes them with `torch.save`; each rank maps the file to read its own."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @override
    def save(self, path: Path, tensors: Tensors) -> None:
        whole = self._gather(tensors)
        if self._group.rank() == 0:
            path.mkdir(parents=True)
            with (path / "part").open("wb") as file:
                torch.save(whole, file)
                file.flush()
                os.fsync(file.fileno())
            (path / "part").rename(path / "whole")
        dist.barrier(self._group)

    @override
    def is_whole(self, path: Path) -> bool:
        return (path / "whole").exists()

    @override
    def load(self, path: Path, tensors: Tensors, kind: str) -> None:
        whole = torch.load(path / "whole", mmap=True, weights_only=True)
        for name, tensor in tensors.items():
            tensor.copy_(whole[name])

    def _gather(self, tensors: Tensors) -> dict[str, Tensor]:
        if self._group.rank() > 0:
            dist.gather_object({name: tensor.shape for name, tensor in tensors.items()}, group=self._group, dst=0)
            for tensor in tensors.values():
                dist.send(tensor, 0, self._group)
            return {}
        shapes: list[Any] = [None] * self._group.size()
        dist.gather_object({}, shapes, group=self._group, dst=0)
        whole = dict(tensors)
        for rank, names in enumerate(shapes):
            for name, shape in names.items():
                whole[name] = torch.empty(shape)
                dist.recv(whole[name], rank, self._group)
        return whole


class BytesAlone(Way):
    """Each rank writes its tensors' bytes to a file and reads them again: what the disk allows."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @override
    def save(self, path: Path, tensors: Tensors) -> None:
        path.mkdir(parents=True, exist_ok=True)
        with self._file(path).open("wb", buffering=0) as file:
            for tensor in tensors.values():
                file.write(_bytes(tensor))
            os.fsync(file.fileno())
        dist.barrier(self._group)

    @override
    def is_whole(self, path: Path) -> bool:
        return True

    @override
    def load(self, path: Path, tensors: Tensors, kind: str) -> None:
        with self._file(path).open("rb", buffering=0) as file:
            for tensor in tensors.values():
                file.readinto(_bytes(tensor))

    def _file(self, path: Path) -> Path:
        return path / f"{self._group.rank()}"


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.view(-1).numpy().data.cast("B")


def _kind(name: str) -> Any:
    return name.split("/")[0]


def all_ways() -> dict[str, Way]:
    """The ways by their names, each with a group of its own: a save in the background must not meet other messages."""
    group = dist.new_group
    return {
        "ours": Ours(group()),
        "ours, async": Ours(group(), group()),
        "torch": Torchs(group(), in_background=False),
        "torch, async": Torchs(group(), in_background=True),
        "one file": OneFile(group()),
        "bytes alone": BytesAlone(group()),
    }

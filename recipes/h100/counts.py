"""Counts what one block makes a rank of a cube do. There are no other ranks, and collectives move nothing.

Tensors have no values (the meta device), so blocks of any size are counted in a moment. The collectives take the
branches for native groups, as over NCCL.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from recipes.h100.models import Llama


class Tally:
    """Collectives, and the bytes that they bring to one rank by the optimal algorithm."""

    def __init__(self) -> None:
        self.collectives = self.received = 0


class CountingGroup:
    """Takes the place of one rank's group of `size` ranks. Results keep what was in their memory."""

    def __init__(self, tally: Tally, size: int) -> None:
        self._tally = tally
        self._size = size

    def _allgather_base(self, whole: Tensor, own: Tensor) -> "CountingGroup":
        return self.allgather_into_tensor_coalesced([whole], [own])

    def allgather_into_tensor_coalesced(self, wholes: Sequence[Tensor], own: Sequence[Tensor]) -> "CountingGroup":
        """One collective, as over NCCL."""
        return self._count(wholes, 1)

    def _reduce_scatter_base(self, own: Tensor, whole: Tensor, options: Any) -> "CountingGroup":
        return self.reduce_scatter_tensor_coalesced([own], [whole], options)

    def reduce_scatter_tensor_coalesced(
        self, own: Sequence[Tensor], wholes: Sequence[Tensor], options: Any
    ) -> "CountingGroup":
        """One collective, as over NCCL."""
        return self._count(wholes, 1)

    def alltoall_base(self, received: Tensor, sent: Tensor, *sizes: Any) -> "CountingGroup":
        """Each rank keeps its own part."""
        return self._count([received], 1)

    def allreduce(self, tensors: Sequence[Tensor], *options: Any) -> "CountingGroup":
        """A reduce-scatter and an all-gather."""
        return self._count(tensors, 2)

    def wait(self) -> None:
        """Return at once: nothing is under way."""

    def _count(self, wholes: Sequence[Tensor], times: int) -> "CountingGroup":
        self._tally.collectives += 1
        self._tally.received += times * sum(whole.nbytes for whole in wholes) * (self._size - 1) // self._size
        return self


class _CountingAxis(MeshAxis):
    """Takes its group for a native one."""

    def __init__(self, group: Any, size: int, rank: int, **_: Any) -> None:
        super().__init__(None, size, rank)
        self.group = self._native = group


def counting_mesh(sizes: MeshSizes, tally: Tally) -> Mesh:
    """The mesh as its rank 0 sees it, without other ranks."""
    one = Mesh(sizes, 0, lambda names: None)
    return Mesh(sizes, 0, lambda names: CountingGroup(tally, one.size(names)), _CountingAxis)  # type: ignore[arg-type,return-value]


@dataclass(frozen=True)
class Pass:
    """What a forward or a backward of one block makes one rank do."""

    calls: int
    """operations that the host starts"""
    collectives: int
    received: int
    """bytes that collectives bring, by the optimal algorithm"""
    flops: int


@dataclass(frozen=True)
class BlockCounts:
    """Counts of one block and one micro-batch on one rank of a cube."""

    forward: Pass
    backward: Pass
    saved: int
    """bytes that the forward keeps for the backward, besides parameters"""


_VIEWS = (
    "detach",
    "view",
    "_unsafe_view",
    "alias",
    "t",
    "transpose",
    "unsqueeze",
    "slice",
    "split",
    "expand",
    "permute",
)
"""start no kernel, and cost the host little compared with those that do"""


class _Calls(TorchDispatchMode):
    """Counts the operations that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._opname not in _VIEWS
        return func(*args, **(kwargs or {}))


def count_block(model: Llama, mesh: MeshSizes, samples: int) -> BlockCounts:
    """Count a block of the model for a micro-batch of so many samples."""
    run = _Run(model, mesh, samples)
    for _ in range(2):  # the second time weights are gathered ahead, as in a batch
        run.forward()
        run.backward()
    saved = _Saved()
    with saved:
        forward = _count(run.forward, run.tally)
    saved.forget(run.block.parameters())
    return BlockCounts(forward, _count(run.backward, run.tally), saved.num_bytes)


class _Run:
    """A block as its rank of the mesh has it, and that rank's part of a micro-batch."""

    def __init__(self, model: Llama, mesh: MeshSizes, samples: int) -> None:
        self.block, self._rotary = model.block(), model.rotary()
        self.tally = Tally()
        self._context, self._length = StageContext(counting_mesh(mesh, self.tally)), model.length
        plan_parallelize([self.block], "layers", mesh).install([self.block], self._context)
        x, y, z = mesh
        assert samples % x == 0, f"{samples} samples don't divide over x = {x}"
        size = samples // x, model.length // y, model.hidden // z
        self._x = torch.empty(size, device="meta", dtype=torch.bfloat16, requires_grad=True)
        self._y = self._x

    def forward(self) -> None:
        self._context.before_forward(self._length)
        self._y = self.block(self._x, position_embeddings=self._rotary)

    def backward(self) -> None:
        self._context.before_backward(self._length)
        self._y.backward(torch.empty_like(self._y))


class _Saved(saved_tensors_hooks):
    """Counts the memory that autograd keeps, each storage once."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        super().__init__(self._keep, lambda tensor: tensor)

    @property
    def num_bytes(self) -> int:
        return sum(self._storages.values())

    def forget(self, tensors: Iterable[Tensor]) -> None:
        """Leave these out."""
        for tensor in tensors:
            self._storages.pop(tensor.untyped_storage()._cdata, None)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage.nbytes()
        return tensor


def _count(run: Callable[[], None], tally: Tally) -> Pass:
    collectives, received = tally.collectives, tally.received
    with FlopCounterMode(display=False) as flops, _Calls() as calls:
        run()
    return Pass(calls.count, tally.collectives - collectives, tally.received - received, flops.get_total_flops())

"""Counts what one block makes a rank of a cube do. There are no other ranks, and collectives move nothing.

Tensors have no values (the meta device), so blocks of any size are counted in a moment. The collectives take the
branches for native groups, as over NCCL.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.tensor_parallel.convert.parallelize import plan_parallelize
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from recipes.h100.counting_group import Tally, counting_mesh
from recipes.h100.models import Llama


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

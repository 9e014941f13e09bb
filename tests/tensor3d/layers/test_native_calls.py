"""Each layer's collectives over native groups: one process plays a rank of the mesh (2, 2, 2) on torch's fake group.

A linear layer      forward    X along y, W along x: all-gathered       Y along z: reduce-scattered
                    backward   dY along z: all-gathered                 dX along y, dW along x: reduce-scattered
q, k, v and gate, up     count as one linear layer each: they share their input, and their weights are gathered together
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hanayo.tensor_parallel.layers.attention import MultiheadAttention3D
from lightning_hanayo.tensor_parallel.layers.embedding import Embedding3D, Head3D, cross_entropy3d
from lightning_hanayo.tensor_parallel.layers.linear import FeedForward3D, Linear3D, SwiGLU3D
from lightning_hanayo.tensor_parallel.layers.norm import Dropout3D, LayerNorm3D, RMSNorm3D
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.sharding import DimShard
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.fake_groups import fake_world

BATCH, LENGTH, WIDTH, VOCABULARY = 4, 8, 16, 24
KINDS = {"allgather": "gather", "reduce_scatter": "scatter", "alltoall": "exchange", "allreduce": "reduce"}


class Loss(nn.Module):
    """The loss of logits that are sharded along the vocabulary."""

    def __init__(self, context: StageContext) -> None:
        super().__init__()
        self.mesh = context.mesh

    def forward(self, logits: Tensor) -> Tensor:
        labels = torch.zeros(logits.shape[:-1], dtype=torch.long)
        return cross_entropy3d(logits, labels, DimShard(VOCABULARY, "yz"), self.mesh)


STREAM = torch.empty(BATCH // 2, LENGTH // 2, WIDTH // 2)
IDS = torch.zeros(BATCH // 2, LENGTH, dtype=torch.long)
LOGITS = torch.empty(BATCH // 2, LENGTH, VOCABULARY // 4)
LAYERS: dict[str, tuple[Callable[[StageContext], nn.Module], Tensor]] = {
    "linear": (lambda c: Linear3D(WIDTH, WIDTH, context=c), STREAM),
    "attention": (lambda c: MultiheadAttention3D(WIDTH, 4, context=c), STREAM),
    "layer norm": (lambda c: LayerNorm3D(WIDTH, context=c), STREAM),
    "rms norm": (lambda c: RMSNorm3D(WIDTH, context=c), STREAM),
    "feed-forward": (lambda c: FeedForward3D(WIDTH, 32, context=c), STREAM),
    "swiglu": (lambda c: SwiGLU3D(WIDTH, 32, context=c), STREAM),
    "dropout": (lambda c: Dropout3D(context=c), STREAM),
    "embedding": (lambda c: Embedding3D(VOCABULARY, WIDTH, context=c), IDS),
    "head": (lambda c: Head3D(WIDTH, VOCABULARY, context=c), STREAM),
    "loss": (Loss, LOGITS),
}
CALLS = {
    "linear": ("2 gather, 1 scatter", "1 gather, 2 scatter"),
    "attention": ("4 gather, 1 reduce, 2 scatter", "2 gather, 4 scatter"),
    "layer norm": ("1 gather", "1 reduce"),
    "rms norm": ("1 reduce", "1 reduce"),
    "feed-forward": ("4 gather, 2 scatter", "2 gather, 4 scatter"),
    "swiglu": ("4 gather, 2 scatter", "2 gather, 4 scatter"),
    "dropout": ("", ""),
    "embedding": ("1 gather, 1 scatter", "1 gather, 1 scatter"),
    "head": ("2 gather, 1 scatter", "1 gather, 2 scatter"),
    "loss": ("3 reduce", ""),
}
"""in the forward and in the backward"""


class Calls(TorchDispatchMode):
    """Counts the calls on process groups."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[next(kind for name, kind in KINDS.items() if name in func._opname)] += 1
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))


def calls_of(make: Callable[[StageContext], nn.Module], x: Tensor) -> tuple[str, str]:
    with fake_world(3, 8):
        context = StageContext(Mesh.create((2, 2, 2)))
        layer = make(context)
        own = x.clone().requires_grad_(x.is_floating_point())
        context.before_forward(LENGTH, BATCH)  # attention takes [seq, batch, h]
        with Calls() as forward:
            y = layer(own) if not isinstance(layer, MultiheadAttention3D) else layer(own, own, own)[0]
        context.before_backward(LENGTH, BATCH)
        with Calls() as backward:
            y.backward(torch.empty_like(y))
        return str(forward), str(backward)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_makes_these_calls(kind: str) -> None:
    assert calls_of(*LAYERS[kind]) == CALLS[kind]

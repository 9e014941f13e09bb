"""The protocol with which layers leave weight gradients for later, while their stage's backward is split.

I    dx = dy W             runs now: the stage before is waiting for it
W    dW = dy^T x           runs when the schedule says so: `compute(dy, x)`, kept with its operands

Layers use this protocol and stages own an object that implements it, so neither depends on the other.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class PendingGradient(Protocol):
    """A gradient whose sum over ranks is under way."""

    def wait(self) -> "Tensor":
        """Wait for the sum, and return the gradient."""


ComputeGradient = Callable[..., "Tensor | PendingGradient | None"]
"""Computes a gradient from the operands it was left with. None: it has been put elsewhere, and is added later."""


class WeightGradients(Protocol):
    """Where the layers of one stage leave their weight gradients."""

    version: int
    """Changes between batches. When it changes, layers must drop copies of their weights.

    A weight's own `_version` does not tell: fused optimizers do not change it.
    """

    @property
    def is_open(self) -> bool:
        """Whether layers leave their weight gradients: an input gradient is being computed."""

    def put(self, parameter: "Tensor", compute: ComputeGradient, *operands: "Tensor") -> None:
        """Keep a computation whose result is to be added to `parameter.grad`. The operands must have no graph."""


def gradient_dtype(parameter: "Tensor") -> "torch.dtype":
    """The dtype of its `.grad`: its own, unless gradients in bf16 or fp16 are added up in fp32."""
    return (parameter.grad_dtype if parameter.is_leaf else None) or parameter.dtype

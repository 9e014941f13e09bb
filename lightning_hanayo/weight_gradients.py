"""The weight gradients: where a layer leaves the product that makes one, while its stage's backward is split.

I    dx = dy W             runs now, the stage before is waiting for it
W    dW = dy^T x           runs when the schedule says so: `product(dy, x)`, kept with its operands

Layers know this protocol, stages own what implements it; neither knows the other.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class PendingGradient(Protocol):
    """A gradient that isn't there yet: its sum over ranks is under way."""

    def wait(self) -> "Tensor":
        """The gradient, once it is there."""


Product = Callable[..., "Tensor | PendingGradient"]
"""Makes a gradient out of the operands it was left with."""


class WeightGradients(Protocol):
    """One stage's."""

    @property
    def is_open(self) -> bool:
        """Whether products are kept: an input gradient is being computed, and the weights' come later."""

    @property
    def version(self) -> int:
        """Changes between batches. A layer must drop copies of its weight when it changes.

        A weight's own `_version` doesn't tell: fused optimizers leave it as it is.
        """

    def put(self, parameter: "Tensor", product: Product, *operands: "Tensor") -> None:
        """Keep a product whose result is to be added to `parameter.grad`. The operands belong to no graph."""

"""The weight-gradient queue: what a stage's `I` leaves for its `W`, per micro-batch.

I0   put(weight, product, dy, x)      micro-batch 0:  weight -> [product(dy, x)]  bias -> [product(dy)]
W0   drain(0)                         weight.grad += dy^T x, and dy and x are free
"""

from typing import Self

import torch
from torch import Tensor

from lightning_hanayo.weight_gradients import PendingGradient, Product

_Made = list[Tensor | PendingGradient]
_Pieces = list[tuple[Product, tuple[Tensor, ...]]]


class WeightGradientQueue:
    """Open while the input gradients of one micro-batch are computed; otherwise layers make their gradients at once."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[Tensor, _Pieces]] = {}
        self._open: dict[Tensor, _Pieces] | None = None
        self._version = 0

    @property
    def is_open(self) -> bool:
        """Whether products are kept."""
        return self._open is not None

    @property
    def version(self) -> int:
        """See `WeightGradients`: another one in every batch, and between two."""
        return self._version

    @property
    def num_bytes(self) -> int:
        """Memory that operands hold, each storage once."""
        operands = [operand for waiting in self._waiting.values() for pieces in waiting.values()
                    for _, operands in pieces for operand in operands]  # fmt: skip
        storages = {operand.untyped_storage().data_ptr(): operand.untyped_storage().nbytes() for operand in operands}
        return sum(storages.values())

    def collecting(self, microbatch: int) -> Self:
        """Keep the products of `microbatch`, until the `with` statement that calls this ends."""
        self._open = self._waiting[microbatch] = {}
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = None

    def put(self, parameter: Tensor, product: Product, *operands: Tensor) -> None:
        """Keep a product of the open micro-batch."""
        assert self._open is not None
        self._open.setdefault(parameter, []).append((product, operands))

    def drain(self, microbatch: int) -> None:
        """Run the products of `microbatch` and add them to the parameters' gradients; their operands become free.

        A parameter's products are added to each other first, as autograd does, so sums agree to the last bit.
        """
        waiting = self._waiting.pop(microbatch, None)
        late: tuple[Tensor, _Made] | None = None
        with torch.no_grad():
            while waiting:
                parameter, pieces = waiting.popitem()
                made = [product(*operands) for product, operands in pieces]
                del pieces  # free, however long a sum over ranks takes
                if late is not None:
                    add(*late)
                late = parameter, made
            if late is not None:
                add(*late)

    def clear(self) -> None:
        """Forget everything, before a batch and after it."""
        self._waiting.clear()
        self._version += 1


def add(parameter: Tensor, made: _Made) -> None:
    """Add the sum of what was `made` to `parameter.grad`: in its own dtype, kept in the parameter's, as by autograd."""
    total: Tensor | None = None
    for gradient in made:
        gradient = gradient if isinstance(gradient, Tensor) else gradient.wait()
        total = gradient if total is None else total + gradient
    assert total is not None
    if total.dtype is not parameter.dtype:
        total = total.to(parameter.dtype)
    if (known := parameter.grad) is None:
        parameter.grad = total
    else:
        known.add_(total)

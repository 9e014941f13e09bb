"""The weight-gradient queue: keeps what a stage's `I` actions leave for its `W` actions, for each micro-batch.

I0   put(weight, compute, dy, x)      micro-batch 0:  weight -> [compute(dy, x)]  bias -> [compute(dy)]
W0   drain(0)                         weight.grad += dy^T x; dy and x are freed
"""

from typing import Self

import torch
from torch import Tensor

from lightning_hanayo.weight_gradients import ComputeGradient, PendingGradient, gradient_dtype

_Computations = list[tuple[ComputeGradient, tuple[Tensor, ...]]]
_Gradients = list[Tensor | PendingGradient]


class WeightGradientQueue:
    """Open while one micro-batch's input gradients are computed. Otherwise layers make weight gradients at once."""

    def __init__(self) -> None:
        self._waiting: dict[int, dict[Tensor, _Computations]] = {}
        self._open: dict[Tensor, _Computations] | None = None
        self.version = 0
        """changes before and after every batch: then layers drop copies of their weights"""

    @property
    def is_open(self) -> bool:
        """Whether layers leave their weight gradients here."""
        return self._open is not None

    def save(self) -> "dict[Tensor, _Computations] | None":
        """What belongs to the action that runs now, while another one runs."""
        return self._open

    def restore(self, saved: "dict[Tensor, _Computations] | None") -> None:
        """The action runs again."""
        self._open = saved

    def collecting(self, microbatch: int) -> Self:
        """Open the queue for `microbatch`, in a `with` statement."""
        self._open = self._waiting[microbatch] = {}
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open = None

    def put(self, parameter: Tensor, compute: ComputeGradient, *operands: Tensor) -> None:
        """Keep a computation of the open micro-batch."""
        assert self._open is not None
        self._open.setdefault(parameter, []).append((compute, operands))

    def drain(self, microbatch: int) -> None:
        """Compute the weight gradients of `microbatch`, add them to `.grad`, and free the operands.

        The gradients of one parameter are added to each other first, as in autograd, so sums agree to the last bit.
        """
        waiting = self._waiting.pop(microbatch, None)
        pending: tuple[Tensor, _Gradients] | None = None
        with torch.no_grad():
            while waiting:
                parameter, computations = waiting.popitem()
                computed = [compute(*operands) for compute, operands in computations]
                gradients = [one for one in computed if one is not None]
                del computations  # frees the operands now, even if a sum over ranks takes long
                if pending is not None:
                    accumulate(*pending)
                pending = (parameter, gradients) if gradients else None
            if pending is not None:
                accumulate(*pending)

    def clear(self) -> None:
        """Forget everything, before a batch and after it."""
        self._waiting.clear()
        self.version += 1


def accumulate(parameter: Tensor, gradients: _Gradients) -> None:
    """Add the sum of `gradients` to `parameter.grad`, in its dtype. The sum is in the gradients' own dtype.

    Only where `.grad` has another dtype than the parameter, each gradient is cast before the sum, as autograd does it.
    """
    dtype = gradient_dtype(parameter)
    total: Tensor | None = None
    for gradient in gradients:
        gradient = gradient if isinstance(gradient, Tensor) else gradient.wait()
        if dtype is not parameter.dtype:
            gradient = gradient.to(dtype)
        total = gradient if total is None else total + gradient
    assert total is not None
    if total.dtype is not dtype:
        total = total.to(dtype)
    if (before := parameter.grad) is None:
        parameter.grad = total
    else:
        before.add_(total)

"""Adds the gradients of tied parameters, which the code before the stack and the loss both use, in autograd's order.

    one process    grad += (head's + embedding's)         for micro-batch 0, then 1, then 2, ...
    a pipeline     head's of 0, head's of 1, embedding's of 0, ...     so the head's part waits for the embedding's

In any other order the sum would differ in its last bits. A part, as large as the parameter, is kept from the loss's
backward until the backward of the first stage. Where that is too much memory, parts are added at once, in a
pipeline's order.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


class TiedGradients:
    """The loss's parts of the gradients, until the first stage's parts are made; none unless `in_order`."""

    def __init__(self, *, in_order: bool = True) -> None:
        self._in_order = in_order
        self._parts: dict[int, dict[Tensor, Tensor]] = {}

    def begin_batch(self) -> None:
        """Forget parts of the batch before."""
        self._parts.clear()

    def loss_backward(self, microbatch: int, parameters: Iterable[Tensor], backward: Callable[[], None]) -> None:
        """Run the loss's `backward`, and set aside what it adds to `parameters`, if an order is kept."""
        if not self._in_order:
            backward()
            return
        with _separately(parameters) as part:
            backward()
        self._parts[microbatch] = part

    def first_stage_backward(self, microbatch: int, backward: Callable[[], None]) -> None:
        """Run the first stage's `backward`, and add both parts to `.grad` at once."""
        part = self._parts.pop(microbatch, {})
        with _separately(part) as own:
            backward()
        for parameter, gradient in part.items():
            total = gradient + own[parameter] if parameter in own else gradient
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)


@contextmanager
def _separately(parameters: Iterable[Tensor]) -> Iterator[dict[Tensor, Tensor]]:
    """Collect the gradients that are made inside, and leave `.grad` as it was."""
    before = {parameter: parameter.grad for parameter in parameters}
    for parameter in before:
        parameter.grad = None
    made: dict[Tensor, Tensor] = {}
    yield made
    for parameter, gradient in before.items():
        if parameter.grad is not None:
            made[parameter] = parameter.grad
        parameter.grad = gradient

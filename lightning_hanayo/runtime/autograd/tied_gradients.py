"""Shared gradients: of parameters that both the code before the stack and the loss use, as a tied embedding.

    one process    grad += (head's + embedding's)         for micro-batch 0, then 1, then 2, ...
    a pipeline     head's of 0, head's of 1, embedding's of 0, ...     so the head's part waits for the embedding's

Added in any other order the sum would differ in its last bits. At most the micro-batches between a loss's backward and
stage 0's are held.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor


class TiedGradients:
    """The parts that wait."""

    def __init__(self) -> None:
        self._parts: dict[int, dict[Tensor, Tensor]] = {}

    def loss_backward(self, microbatch: int, parameters: Iterable[Tensor], backward: Callable[[], None]) -> None:
        """Run the loss's `backward`; what it adds to `parameters` is set aside."""
        with _apart(parameters) as part:
            backward()
        self._parts[microbatch] = part

    def first_stage_backward(self, microbatch: int, backward: Callable[[], None]) -> None:
        """Run stage 0's `backward`, and add both parts at once."""
        part = self._parts.pop(microbatch, {})
        with _apart(part) as own:
            backward()
        for parameter, gradient in part.items():
            total = gradient + own[parameter] if parameter in own else gradient
            parameter.grad = total if parameter.grad is None else parameter.grad.add_(total)


@contextmanager
def _apart(parameters: Iterable[Tensor]) -> Iterator[dict[Tensor, Tensor]]:
    sums = {parameter: parameter.grad for parameter in parameters}
    for parameter in sums:
        parameter.grad = None
    part: dict[Tensor, Tensor] = {}
    yield part
    for parameter, total in sums.items():
        if parameter.grad is not None:
            part[parameter] = parameter.grad
        parameter.grad = total

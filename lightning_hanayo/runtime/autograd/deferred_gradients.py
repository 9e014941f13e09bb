"""The hand-over: gradients made during the training step, given to the parameters when Lightning runs backward.

    Lightning    training_step -> zero_grad -> backward -> clip -> step
    the schedule  F F B B ...                  hand over

Lightning zeroes gradients after the training step, so the step takes its gradients away again and leaves what it found.

While batches accumulate, new gradients are added to the old ones as they are made. If Lightning's backward then sends
another factor than was expected, it is too late to multiply the new ones alone. So where the user's code may send one,
they are kept separate from the old ones, and added when the factor is known.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError


class DeferredGradients:
    """The gradients of one batch, between `training_step` and `backward`.

    Args:
        parameters: all that this rank trains.
        accumulates: whether the batch adds to the gradients that are there, as all but the first accumulated batch do.
        keeps_old: whether gradients that the batch doesn't add to are put back; otherwise their memory is free.
        separate: whether the batch makes its gradients separately from those that it adds to.
        finish: called when all gradients are in place.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        accumulates: bool,
        keeps_old: bool = True,
        separate: bool = False,
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._continues = accumulates
        self._separate = accumulates and separate
        self._finish = finish
        self._found = [parameter.grad if accumulates or keeps_old else None for parameter in self._parameters]
        self._fresh: list[Tensor | None] = []
        if not accumulates or separate:
            self._put([None] * len(self._parameters))

    def stash(self) -> None:
        """Take the batch's gradients away, and put back what was found."""
        self._fresh = [parameter.grad for parameter in self._parameters]
        self._put(self._found)

    def surrogate_loss(self, value: Tensor, scale: float) -> Tensor:
        """A loss of that `value`, whose backward gives the gradients to the parameters.

        Args:
            value: what Lightning shall see.
            scale: the gradient that Lightning's backward is expected to send, already in the gradients.
        """
        return _HandOver.apply(self, scale, value.detach(), _ANCHOR)  # type: ignore[no-any-return]

    def apply(self, factor: Tensor) -> None:
        """Give the gradients to the parameters, times `factor`: unread where reading it would wait for a device.

        Raises:
            UnsupportedError: an unexpected factor, and the gradients are added to older ones already.
        """
        if self._continues and not self._separate:
            _check(factor)
        else:
            made = [gradient for gradient in self._fresh if gradient is not None]
            if made and (factor.device.type != "cpu" or factor != 1.0):
                torch._foreach_mul_(made, factor)
        self._put(self._sums() if self._separate else self._fresh)
        self._fresh = self._found = []
        if self._finish is not None:
            self._finish()

    def _sums(self) -> list[Tensor | None]:
        """What was found, plus what the batch has made."""
        pairs = list(zip(self._found, self._fresh, strict=True))
        return [made if old is None else old if made is None else old.add_(made) for old, made in pairs]

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


def _check(factor: Tensor) -> None:
    """See that the factor is 1; on a device without waiting for it, which then ends the process."""
    message = (
        "While batches accumulate, the loss that Lightning sends backward was multiplied by something else than "
        "1 / accumulate_grad_batches. Scale it in training_step, or in an override of LightningModule.backward or "
        "on_before_backward."
    )
    if factor.device.type != "cpu":
        torch._assert_async(factor == 1.0, message)
    elif factor != 1.0:
        raise UnsupportedError(message)


class _HandOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handover: DeferredGradients, scale: float, value: Tensor, anchor: Tensor) -> Tensor:
        ctx.handover, ctx.scale = handover, scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.handover.apply(gradient / torch.full_like(gradient, ctx.scale))  # exactly 1 if it is what was expected
        return None, None, None, None


_ANCHOR = torch.ones((), requires_grad=True)
"""what makes a value have a backward; it gets no gradient"""

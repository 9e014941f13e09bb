"""Keeps the gradients that the training step has made, until Lightning runs backward.

    Lightning    training_step -> zero_grad -> backward -> clip -> step
    pipeline      F F B B ...                  set .grad

Lightning zeroes gradients after the training step. So the step stashes the gradients it has made, and puts back those
it found.

While batches accumulate, new gradients are added to the old ones as they are made. If Lightning's backward then sends
an unexpected factor, it is too late to multiply only the new ones. So where the user's code may send one, the new
gradients are kept separate, and added to the old ones when the factor is known.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError


class DeferredGradients:
    """The gradients of one batch, between `training_step` and `backward`.

    Args:
        parameters: all parameters that this rank trains.
        accumulates: whether the batch adds to the existing gradients, as all but the first accumulated batch do.
        keeps_old: whether existing gradients that the batch does not add to are put back; otherwise they are freed.
        shows_old: whether the step may look at the existing gradients, and add to them, as in one process. Then
            `end_step` is called before the batch's backward.
        shows_in_steps: whether the step of each micro-batch may look at the existing gradients, inside `in_step`. They
            take memory until the last one has run.
        separate: whether the batch keeps its gradients separate from those that it adds to, if it does.
        scales: whether Lightning's backward may send another factor than expected; otherwise a device isn't asked, as
            a product with all gradients would read and write them once more.
        finish: called when all gradients are in `.grad`.
        unguarded: entered while gradients are put into `.grad`, also where user code has called backward.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        accumulates: bool,
        keeps_old: bool = True,
        shows_old: bool = False,
        shows_in_steps: bool = False,
        separate: bool = False,
        scales: bool = True,
        finish: Callable[[], None] | None = None,
        unguarded: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._parameters = list(parameters)
        self._continues = accumulates
        self._separate = separate
        self._shows_in_steps = shows_in_steps
        self._scales = scales
        self._finish = finish
        self._unguarded = unguarded
        self._keeps_old = accumulates or keeps_old or shows_in_steps
        self._old: list[Tensor | None] = []
        self._new: list[Tensor | None] = []
        if not shows_old:
            self.end_step()

    def end_step(self) -> None:
        """Put aside what Lightning zeroes after the step: old gradients, and what a backward in the step has added."""
        self._old = [parameter.grad if self._keeps_old else None for parameter in self._parameters]
        if not self._continues or self._separate:
            self._set([None] * len(self._parameters))

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around user code of a step, where others are under way: it finds no gradients of theirs, and leaves none."""
        made = [parameter.grad for parameter in self._parameters]
        self._set(self._old if self._shows_in_steps else [None] * len(made))
        yield
        self._set(made)

    def stash(self) -> None:
        """Take the batch's gradients out of `.grad`, and put the old ones back."""
        self._new = [parameter.grad for parameter in self._parameters]
        self._set(self._old)

    def surrogate_loss(self, value: Tensor, scale: float | Tensor) -> Tensor:
        """Return a loss of this value for Lightning, whose backward puts the gradients into `.grad`.

        Lightning's backward is expected to send the gradient `scale`, which the stashed gradients contain.
        """
        return _SurrogateLoss.apply(self, scale, value.detach(), _ANCHOR)  # type: ignore[no-any-return]

    def apply(self, factor: Tensor) -> None:
        """Put the gradients into `.grad`, times `factor`. Does not wait for a device to read the factor.

        Raises:
            UnsupportedError: the factor is not 1, and the gradients have already been added to older ones.
        """
        if self._continues and not self._separate:
            _check(factor)
        else:
            new = [gradient for gradient in self._new if gradient is not None]
            if new and (self._scales if factor.device.type != "cpu" else factor != 1.0):
                torch._foreach_mul_(new, factor)
        with self._unguarded():
            self._set(self._sums() if self._separate else self._new)
            self._new = self._old = []
            if self._finish is not None:
                self._finish()

    def _sums(self) -> list[Tensor | None]:
        """The old gradients plus the new ones."""
        pairs = list(zip(self._old, self._new, strict=True))
        return [new if old is None else old if new is None else old.add_(new) for old, new in pairs]

    def _set(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


def _check(factor: Tensor) -> None:
    """Check that the factor is 1. On a device this does not wait; if the check fails there, it ends the process.

    It isn't finite where a loss in fp16 can't hold the loss scale. The gradients have then overflowed with it, and the
    scaler skips the step.
    """
    is_expected = (factor == 1.0) | ~factor.isfinite()
    message = (
        "While batches accumulate, the loss that Lightning runs backward on was multiplied by something else than "
        "1 / accumulate_grad_batches. Scale it in training_step, or in an override of LightningModule.backward or "
        "on_before_backward."
    )
    if factor.device.type != "cpu":
        torch._assert_async(is_expected, message)
    elif not is_expected:
        raise UnsupportedError(message)


class _SurrogateLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, deferred: DeferredGradients, scale: float | Tensor, value: Tensor, anchor: Tensor) -> Tensor:
        ctx.deferred, ctx.scale = deferred, scale
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        scale = ctx.scale
        expected = scale.to(gradient.dtype) if isinstance(scale, Tensor) else torch.full_like(gradient, scale)
        ctx.deferred.apply(gradient / expected)  # exactly 1 if it is as expected
        return None, None, None, None


_ANCHOR = torch.ones((), requires_grad=True)
"""makes a surrogate loss require a gradient; it gets none itself"""

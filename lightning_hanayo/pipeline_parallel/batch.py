"""The batch that is running, for the engine, the stages and the user's step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.errors import PeerFailed

StepFunction = Callable[[int], Any]
"""Runs the user's step on the micro-batch of that index, and returns its result."""


@dataclass(frozen=True)
class Batch:
    """One batch on one rank. It goes down the calls: engine, stage, user's step.

    Example:
        >>> batch = Batch(step=lambda m: model(inputs[m]).mean(), loss_weights=[0.5, 0.5])
        >>> engine.run(program, batch)  # on the other pipeline ranks: engine.run(program, Batch())
        >>> batch.results[0]

    Args:
        signature: the same for batches whose messages have the same shapes; equal on all pipeline ranks.
        reduce_gradients: whether each stage's gradients are reduced over the data ranks; not while batches accumulate.
        step: runs the user's step on one micro-batch; None on ranks without user code.
        dry_run_step: the same on all samples that this rank's blocks work on; only with tensor parallelism.
        on_user_code: called with a micro-batch's index each time before its user code starts or continues, and with
            None before a dry run, whose logs and metrics do not count.
        on_whole_step: called when a step has ended that ran whole, on the only micro-batch, before its backward.
        in_step: entered while user code of a step runs, unless it runs whole on the only micro-batch.
        on_loss: called before a micro-batch's backward with its index and its loss.
        inputs: the micro-batches themselves, for self-contained stages, which have no user's step.
        loss_weights: each micro-batch's weight in the gradient; only the rank with the loss reads them.
        loss_scale: a further factor of the weighted losses, on their device, so that small gradients in fp16
            don't vanish; None: nothing.
        num_microbatches: how many there are, for errors.
        num_samples: how many samples each has for this rank's user code; empty where that isn't known.
        pass_number: which pass through the stack of the micro-batches' steps runs now.
        is_whole: whether the step runs once, on the whole batch: then it has one weight and one result, at index 0.
        has_loss: whether backwards begin with the loss; not those of earlier passes of the same step.
        results: filled by the last stage: the step's result for each micro-batch, or its loss (self-contained).
    """

    signature: int = 0
    reduce_gradients: bool = True
    step: StepFunction | None = None
    dry_run_step: StepFunction | None = None
    on_user_code: Callable[[int | None], None] = lambda _: None
    on_whole_step: Callable[[], None] = lambda: None
    in_step: Callable[[], AbstractContextManager[None]] = nullcontext
    on_loss: Callable[[int, Tensor], None] = lambda *_: None
    inputs: Sequence[Any] = ()
    loss_weights: Sequence[float] = ()
    loss_scale: Tensor | None = None
    num_microbatches: int = 1
    num_samples: Sequence[int] = ()
    pass_number: int = 0
    is_whole: bool = False
    has_loss: bool = True
    results: dict[int, Any] = field(default_factory=dict)

    def weighted(self, microbatch: int, loss: Tensor) -> Tensor:
        """The loss whose backward gives the micro-batch's gradients."""
        weighted = loss * self.loss_weights[microbatch]
        return weighted if self.loss_scale is None else weighted * self.loss_scale

    def note_microbatch(self, error: Exception, microbatch: int) -> None:
        """Let an error of a step or a block say on which micro-batch it was: user code expects a whole batch."""
        if self.is_whole and isinstance(error, torch.OutOfMemoryError):
            error.add_note(
                "The step runs once on the whole batch, so this rank holds the activations of all its micro-batches. "
                "HanayoStrategy(step='microbatch') runs it on one after another."
            )
        if self.num_microbatches == 1 or isinstance(error, PeerFailed):
            return
        sizes = f" of {', '.join(map(str, self.num_samples))} samples" if self.num_samples else ""
        runs = "the blocks run" if self.is_whole else "the step and the blocks run"
        error.add_note(
            f"This was on micro-batch {microbatch} (of 0 to {self.num_microbatches - 1}{sizes}): {runs} on one "
            f"micro-batch of a batch at a time."
        )

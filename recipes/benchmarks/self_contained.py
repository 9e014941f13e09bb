"""Self-contained stages: of a stack whose last block computes the loss, with no user's step around it.

    inputs[m] -> SelfContainedFirstStage -> ...MiddleStage ... -> ...LastStage -> results[m], the loss
    inputs[m] -> SelfContainedSingleStage -> results[m]

The first block takes a micro-batch, which may be any tree; each block passes on what later blocks need of it (targets,
say). Each other block takes what the block before it returned. The first and the last stage need nothing of each other,
so they may be on any ranks: in a loop the last one is on the last rank.
"""

from dataclasses import dataclass

import torch
from typing_extensions import override

from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import Proxy
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput
from lightning_hanayo.pipeline_parallel.p2p import Message, gradient_message
from lightning_hanayo.pipeline_parallel.pytree import Flattener
from lightning_hanayo.pipeline_parallel.stages import MiddleStage

_CALL = Flattener().flatten(((Proxy(),), {}))
"""a block's call: the only argument is the output of the block before it"""


@dataclass(eq=False, repr=False, kw_only=True)
class SelfContainedFirstStage(MiddleStage):
    """The first blocks. `Batch.inputs` holds the micro-batches; only those that this stage runs need a value."""

    num_blocks: int
    """of the whole stack"""

    def __post_init__(self) -> None:
        self._call_of_block = (0,) * self.num_blocks

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        flattener = Flattener()
        skeleton = flattener.flatten(batch.inputs[microbatch], "the micro-batch")
        stage_input = StageInput(skeleton, (_CALL,), self._call_of_block, tensors=tuple(flattener.tensors))
        return super().forward(batch, microbatch, stage_input.message)

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        super().backward(batch, microbatch, received)


class SelfContainedLastStage(MiddleStage):
    """The last blocks, up to the loss, which becomes the micro-batch's entry in `Batch.results`."""

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        keep_loss(batch, microbatch, super().forward(batch, microbatch, received))

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        return super().backward(batch, microbatch, loss_gradient(batch, microbatch))


class SelfContainedSingleStage(SelfContainedFirstStage):
    """The whole stack on one rank."""

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        keep_loss(batch, microbatch, super().forward(batch, microbatch, received))

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        super().backward(batch, microbatch, loss_gradient(batch, microbatch))


def keep_loss(batch: Batch, microbatch: int, made: Message | None) -> None:
    """Make the last block's output the micro-batch's result."""
    assert made is not None
    batch.results[microbatch] = StageInput.from_message(made).output.detach()


def loss_gradient(batch: Batch, microbatch: int) -> Message:
    """The gradient of the micro-batch's loss: its weight."""
    weight = batch.loss_weights[microbatch]  # with weight 0 not even a NaN counts
    return gradient_message([torch.full_like(batch.results[microbatch], weight) if weight else None])

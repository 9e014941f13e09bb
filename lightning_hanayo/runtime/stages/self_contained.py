"""Self-contained stages: of a stack whose last block computes the loss, with no user's step around it.

    inputs[m] -> SelfContainedFirstStage -> MiddleStage ... -> SelfContainedLastStage -> results[m], the loss

The first block takes a micro-batch, which may be any tree; each block passes on what later blocks need of it (targets,
say). Each other block takes what the block before it returned. The first and the last stage need nothing of each other,
so they may be on any ranks: on the last rank in a loop, on two ranks at once in chimera.
"""

from collections.abc import Sequence

import torch
from torch import nn
from typing_extensions import override

from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.proxy import Proxy
from lightning_hanayo.runtime.capture.stage_input import StageInput
from lightning_hanayo.runtime.comm.message import Message, gradient_message
from lightning_hanayo.runtime.comm.pytree import Flattener
from lightning_hanayo.runtime.stages.base import MiddleStage, Stage

_CALL = Flattener().flatten(((Proxy(),), {}))
"""a block's call: the only argument is the output of the block before it"""


class SelfContainedFirstStage(Stage):
    """The first blocks. `Batch.inputs` holds the micro-batches; only those that this stage runs need a value.

    Args:
        blocks: the stage's.
        num_blocks: of the whole stack.
        queue: where the stage's layers leave their weight gradients.
    """

    def __init__(self, blocks: Sequence[nn.Module], num_blocks: int, queue: WeightGradientQueue) -> None:
        super().__init__(queue)
        self._inner = MiddleStage(blocks, queue)
        self._call_of_block = (0,) * num_blocks

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message:
        flattener = Flattener()
        skeleton = flattener.flatten(batch.inputs[microbatch], "the micro-batch")
        stage_input = StageInput(skeleton, (_CALL,), self._call_of_block, tuple(flattener.tensors))
        return self._inner.forward(batch, microbatch, stage_input.message)

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        self._inner.backward(batch, microbatch, received)

    @override
    def begin_batch(self) -> None:
        self._inner.begin_batch()


class SelfContainedLastStage(Stage):
    """The last blocks, up to the loss, which becomes the micro-batch's entry in `Batch.results`."""

    def __init__(self, blocks: Sequence[nn.Module], queue: WeightGradientQueue) -> None:
        super().__init__(queue)
        self._inner = MiddleStage(blocks, queue)

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        made = self._inner.forward(batch, microbatch, received)
        batch.results[microbatch] = StageInput.from_message(made).output.detach()

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message:
        weight = batch.loss_weights[microbatch]  # with weight 0 not even a NaN counts
        gradient = torch.full_like(batch.results[microbatch], weight) if weight else None
        return self._inner.backward(batch, microbatch, gradient_message([gradient]))

    @override
    def begin_batch(self) -> None:
        self._inner.begin_batch()

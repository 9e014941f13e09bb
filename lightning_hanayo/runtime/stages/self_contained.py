"""Standalone stages: of a stack that carries its own loss, with no user's step around it.

    batch[m] -> SelfContainedFirstStage -> MiddleStage ... -> SelfContainedLastStage -> losses[m]

The first block takes a micro-batch (any tree: what later blocks need of it, targets say, each block hands on), each
other block what the one before it returned, and the last one returns the loss. So first and last stage need nothing of
each other and may lie on any ranks: on the last one in a loop, on two at once in chimera.
"""

from collections.abc import Sequence

import torch
from torch import nn
from typing_extensions import override

from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.proxy import Proxy
from lightning_hanayo.runtime.capture.stage_input import StageInput
from lightning_hanayo.runtime.comm.message import Message, gradients
from lightning_hanayo.runtime.comm.pytree import Flattener
from lightning_hanayo.runtime.stages.base import MiddleStage, Stage

_TAKES_THE_OUTPUT = Flattener().flatten(((Proxy(),), {}))
"""A block's call: the output of the block before it, and nothing else."""


class SelfContainedFirstStage(Stage):
    """The first blocks. `Batch.inputs` holds the micro-batches; of those that don't come by here any value will do.

    Args:
        blocks: its own.
        num_blocks: of the whole stack.
        queue: see `Stage`.
    """

    def __init__(self, blocks: Sequence[nn.Module], num_blocks: int, queue: WeightGradientQueue) -> None:
        super().__init__(queue)
        self._inner = MiddleStage(blocks, queue)
        self._which = (0,) * num_blocks

    @override
    def forward(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message:
        flattener = Flattener()
        carry = flattener.flatten(batch.inputs[microbatch], "the micro-batch")
        cargo = StageInput(carry, (_TAKES_THE_OUTPUT,), self._which, tuple(flattener.tensors))
        return self._inner.forward(batch, microbatch, cargo.packet)

    @override
    def backward(self, batch: Batch, microbatch: int, arrived: Message | None) -> None:
        self._inner.backward(batch, microbatch, arrived)

    @override
    def clear(self) -> None:
        self._inner.clear()


class SelfContainedLastStage(Stage):
    """The last blocks, up to the loss, which `Batch.results` gets."""

    def __init__(self, blocks: Sequence[nn.Module], queue: WeightGradientQueue) -> None:
        super().__init__(queue)
        self._inner = MiddleStage(blocks, queue)

    @override
    def forward(self, batch: Batch, microbatch: int, arrived: Message | None) -> None:
        leaving = self._inner.forward(batch, microbatch, arrived)
        batch.results[microbatch] = StageInput.of(leaving).output.detach()

    @override
    def backward(self, batch: Batch, microbatch: int, arrived: Message | None) -> Message:
        weight = batch.loss_weights[microbatch]  # without a share, not even a NaN counts
        share = torch.full_like(batch.results[microbatch], weight) if weight else None
        return self._inner.backward(batch, microbatch, gradients([share]))

    @override
    def clear(self) -> None:
        self._inner.clear()

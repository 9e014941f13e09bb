"""The stage: one piece of the stack on one pipeline rank, and what forward and backward of a micro-batch mean there.

FirstStage    user code up to the stack, and the first blocks        runs in the step's thread, which it suspends
MiddleStage   blocks
LastStage     blocks (none, if the schedule has a loss stage), and user code after the stack, up to the loss
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from typing_extensions import override

from lightning_hanayo.runtime.autograd import graph_boundary
from lightning_hanayo.runtime.autograd.graph_boundary import DetachedInputs
from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.carried import NO_CARRIERS, Carriers
from lightning_hanayo.runtime.capture.stage_input import StageInput
from lightning_hanayo.runtime.comm.message import Message, gradient_message, unpack_gradients
from lightning_hanayo.runtime.stages.tensor_parallel_protocols import NoHooks, StageHooks
from lightning_hanayo.schedule import Kind

RunAction = Callable[[Batch, int, Message | None], Message | None]
"""Runs one action of a micro-batch: takes the message it needs, returns the message it makes."""


@dataclass(eq=False, repr=False, kw_only=True)
class Stage(ABC):
    """Runs the actions of one stage. Forward messages are stage inputs, backward messages their gradients."""

    allows_twins: ClassVar[bool] = False
    """whether two forwards, or two backwards, may run at once: not where user code may see that"""

    queue: WeightGradientQueue
    """where the stage's layers leave their weight gradients while the backward is split"""
    hooks: StageHooks = field(default_factory=NoHooks)
    """called before each forward and backward of the blocks"""
    carriers: Carriers = NO_CARRIERS
    """carry what the step and the blocks store for each other"""
    _under_way: defaultdict[int, list[Any]] = field(default_factory=lambda: defaultdict(list), init=False)
    """by micro-batch: what its backward needs of its forward; of several passes, the backward of the last is first"""

    def actions(self) -> dict[Kind, RunAction]:
        """The method that runs each kind of action."""
        return {Kind.F: self.forward, Kind.B: self.backward, Kind.I: self.backward_input, Kind.W: self.backward_weight}

    @abstractmethod
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        """Run the forward; `received` is None in the first stage, and the last one returns None."""

    @abstractmethod
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        """Run the whole backward; `received` is None in the last stage, and the first one returns None."""

    def backward_input(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        """Run the backward, but let layers leave their weight gradients in the queue."""
        with self.queue.collecting(microbatch):
            return self.backward(batch, microbatch, received)

    def backward_weight(self, batch: Batch, microbatch: int, received: Message | None) -> None:
        """Compute the weight gradients that `backward_input` has left; it needs no message."""
        self.queue.drain(microbatch)

    def begin_batch(self) -> None:
        """Forget the micro-batches of the batch before: an evaluation or a failure leaves some."""
        self.queue.clear()
        self.hooks.begin_batch()
        self._under_way.clear()

    def end_batch(self) -> None:
        """Let layers drop copies of their weights: the optimizer may change the weights now."""
        self.hooks.end_batch()
        self.queue.clear()


@dataclass(eq=False, repr=False, kw_only=True)
class MiddleStage(Stage):
    """Blocks without user code."""

    blocks: Sequence[nn.Module]

    @override
    def forward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        assert received is not None
        inputs = DetachedInputs(received)
        stage_input = StageInput.from_message(inputs.message)
        self.hooks.before_forward(stage_input.sequence_length)
        made = stage_input.run(self.blocks, self.carriers).message
        if torch.is_grad_enabled():
            outputs = graph_boundary.edges_of(made.differentiable)
            self._under_way[microbatch].append((inputs, outputs, stage_input.sequence_length))
        return made

    @override
    def backward(self, batch: Batch, microbatch: int, received: Message | None) -> Message | None:
        assert received is not None
        under_way: tuple[DetachedInputs, list[GradientEdge], int] = self._under_way[microbatch].pop()
        inputs, outputs, sequence_length = under_way
        self.hooks.before_backward(sequence_length)
        graph_boundary.run_backward(outputs, unpack_gradients(received))
        return gradient_message(inputs.gradients)

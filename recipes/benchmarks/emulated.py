"""Emulated devices: a stage whose forward, input gradient and weight gradient each take a set time, asleep.

    y = act(x) + wgt(w)       act   sleeps in forward and in its backward: F, and the input gradient I
                              wgt   sleeps in its backward alone: the weight gradient W

Asleep, a rank needs no core, so any number of ranks compute at the same time on a small machine. The numbers are real:
act(x) = x^2 / 2, wgt(w) = w, so that gradients tell whether a runtime played the right thing. torch's own splitter of
the backward finds the addition; ours is left wgt's product (`weight_gradients`). Messages hold `width` floats.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.weight_gradients import WeightGradients
from recipes.benchmarks.machine import sleep

_ANCHOR = torch.zeros(1, requires_grad=True)
"""so that stage 0 computes its input gradient, as its embedding would, though its input needs none"""


@dataclass(frozen=True)
class Times:
    """What one stage takes for one micro-batch, in seconds."""

    forward: float
    backward_input: float
    backward_weight: float


class EmulatedStage(nn.Module):
    """One stage, [1, width] to the same. `queue` takes its weight gradients while a backward is split."""

    def __init__(self, number: int, times: Times) -> None:
        super().__init__()
        self.times = times
        self.queue: WeightGradients | None = None
        self.weight = nn.Parameter(torch.tensor([0.4 + 0.01 * (number % 9)]))

    def forward(self, x: Tensor) -> Tensor:
        """Stays within (0, 1), and so do the gradients."""
        act: Tensor = _Act.apply(x, _ANCHOR, self.times)
        wgt: Tensor = _Weight.apply(self.weight, x.shape, self)
        return act + wgt


class EmulatedLoss(nn.Module):
    """The last stage, and the loss of what it makes."""

    def __init__(self, stage: EmulatedStage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        """A number."""
        return loss_of(self.stage(x))


def loss_of(output: Tensor) -> Tensor:
    """The loss of one micro-batch."""
    return output.square().mean()


def inputs(num_microbatches: int, width: int) -> Tensor:
    """The micro-batches, [micro-batches, width]; no two are alike."""
    rows = torch.linspace(0.1, 0.9, num_microbatches).unsqueeze(1)
    return (rows + 0.05 * torch.linspace(-1.0, 1.0, width)).contiguous()


def expected(num_stages: int, num_microbatches: int, width: int) -> tuple[list[float], list[float]]:
    """Weight gradients by stage, and losses by micro-batch, of one process that doesn't sleep."""
    stages = [EmulatedStage(number, Times(0.0, 0.0, 0.0)) for number in range(num_stages)]
    losses = [loss_of(nn.Sequential(*stages)(x)) for x in inputs(num_microbatches, width).split(1)]
    torch.stack(losses).mean().backward()
    return [gradient_of(stage) for stage in stages], [loss.item() for loss in losses]


def gradient_of(stage: EmulatedStage) -> float:
    """The stage's weight gradient as a number; NaN if there is none."""
    return float("nan") if stage.weight.grad is None else stage.weight.grad.item()


class _Act(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, times: Times) -> Tensor:
        ctx.save_for_backward(x)
        ctx.times = times
        sleep(times.forward)
        return (x * x).mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        sleep(ctx.times.backward_input)
        return gradient * x, None, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: torch.Size, stage: EmulatedStage) -> Tensor:
        ctx.weight, ctx.stage = weight, stage
        return weight.expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        stage: EmulatedStage = ctx.stage
        if stage.queue is not None and stage.queue.is_open:
            stage.queue.put(ctx.weight, stage_product(stage.times.backward_weight), gradient)
            return None, None, None
        return stage_product(stage.times.backward_weight)(gradient), None, None


class stage_product:
    """The product that makes a weight gradient out of what reaches the stage's output, in a set time."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __call__(self, gradient: Tensor) -> Tensor:
        """[1, width] to the weight's [1]."""
        sleep(self._seconds)
        return gradient.sum().reshape(1)

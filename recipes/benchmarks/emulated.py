"""Emulated devices: a stage whose forward, input gradient and weight gradient each take a set time, asleep.

    y = act(x) + wgt(w)       the stage's forward F, act's backward I and wgt's backward W take a set time each

Asleep, a rank needs no core, so any number of ranks compute at the same time on a small machine. The numbers are real:
act(x) = x^2 / 2, wgt(w) = w, so that gradients tell whether a runtime played the right thing; their arithmetic is part
of the set time. torch's own splitter of the backward finds the addition; ours is left wgt's product
(`weight_gradients`). Messages hold `width` floats.
"""

from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.weight_gradients import WeightGradients
from recipes.benchmarks.machine import sleep_until

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
        end = monotonic() + self.times.forward
        act: Tensor = _Act.apply(x, _ANCHOR, self.times.backward_input)
        wgt: Tensor = _Weight.apply(self.weight, x.shape, self)  # made last, so that its backward comes first
        y = act + wgt
        sleep_until(end)
        return y

    def product(self, gradient: Tensor) -> Tensor:
        """The weight gradient, [1], of what reaches the output, [1, width]."""
        end = monotonic() + self.times.backward_weight
        total = gradient.sum().reshape(1)
        sleep_until(end)
        return total


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
    def forward(ctx: Any, x: Tensor, anchor: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.seconds = seconds
        return (x * x).mul_(0.5)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        end = monotonic() + ctx.seconds
        (x,) = ctx.saved_tensors
        gradient = gradient * x
        sleep_until(end)
        return gradient, None, None


class _Weight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: torch.Size, stage: EmulatedStage) -> Tensor:
        ctx.weight, ctx.stage = weight, stage
        return weight.expand(shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        stage: EmulatedStage = ctx.stage
        if stage.queue is not None and stage.queue.is_open:
            stage.queue.put(ctx.weight, stage.product, gradient)
            return None, None, None
        return stage.product(gradient), None, None

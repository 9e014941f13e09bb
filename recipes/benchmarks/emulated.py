"""Emulates devices: a stage sleeps for a set time in its forward, input gradient and weight gradient.

    y = act(x) + wgt(w)       the stage's forward F, act's backward I and wgt's backward W each take a set time

A sleeping rank needs no core, so any number of ranks "compute" at the same time on a small machine. The numbers are
real: act(x) = x^2 / 2 and wgt(w) = w, so the gradients show whether a runtime ran the right actions. The arithmetic is
part of the set time. torch's runtime splits the backward at the addition; in ours, wgt defers its product
(`weight_gradients`). Messages hold `width` floats.
"""

from dataclasses import dataclass
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.weight_gradients import WeightGradients
from recipes.benchmarks.harness import sleep_until

_ANCHOR = torch.zeros(1, requires_grad=True)
"""makes stage 0 compute an input gradient, as an embedding in front of it would require"""


@dataclass(frozen=True)
class StageTimes:
    """The times of one stage for one micro-batch, in seconds."""

    forward: float
    backward_input: float
    backward_weight: float


class EmulatedStage(nn.Module):
    """One stage, [1, width] to [1, width]. `queue` takes its weight gradients while a backward is split."""

    def __init__(self, number: int, times: StageTimes) -> None:
        super().__init__()
        self.times = times
        self.queue: WeightGradients | None = None
        self.weight = nn.Parameter(torch.tensor([0.4 + 0.01 * (number % 9)]))

    def forward(self, x: Tensor) -> Tensor:
        """The output and the gradients stay within (0, 1)."""
        end = monotonic() + self.times.forward
        act: Tensor = _Act.apply(x, _ANCHOR, self.times.backward_input)
        wgt: Tensor = _Weight.apply(self.weight, x.shape, self)  # made last, so that its backward comes first
        y = act + wgt
        sleep_until(end)
        return y

    def product(self, gradient: Tensor) -> Tensor:
        """The weight gradient [1], given the output's gradient [1, width]."""
        end = monotonic() + self.times.backward_weight
        total = gradient.sum().reshape(1)
        sleep_until(end)
        return total


class WithLoss(nn.Module):
    """The last block and the loss of its output."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss, a scalar."""
        return loss_of(self.block(x))


def loss_of(output: Tensor) -> Tensor:
    """The loss of one micro-batch."""
    return output.square().mean()


def inputs(num_microbatches: int, width: int) -> Tensor:
    """The micro-batches, [micro-batches, width], all different."""
    rows = torch.linspace(0.1, 0.9, num_microbatches).unsqueeze(1)
    return (rows + 0.05 * torch.linspace(-1.0, 1.0, width)).contiguous()


def expected(num_stages: int, num_microbatches: int, width: int) -> tuple[list[float], list[float]]:
    """Weight gradients by stage and losses by micro-batch, computed in one process without sleeps."""
    stages = [EmulatedStage(number, StageTimes(0.0, 0.0, 0.0)) for number in range(num_stages)]
    losses = [loss_of(nn.Sequential(*stages)(x)) for x in inputs(num_microbatches, width).split(1)]
    torch.stack(losses).mean().backward()
    return [gradient_of(stage) for stage in stages], [loss.item() for loss in losses]


def gradient_of(stage: nn.Module) -> float:
    """The stage's weight gradient as a number, or NaN if there is none."""
    weight = stage.get_parameter("weight")
    return float("nan") if weight.grad is None else weight.grad.item()


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

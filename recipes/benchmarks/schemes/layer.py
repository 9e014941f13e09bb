"""A Transformer layer's linear layers, what is between them, and the device that computes them.

x -> qkv -> attention -> out -> + x -> fc1 -> activation -> fc2 -> +        norms, biases and dropout are left out
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.pipeline_parallel.stages import NoHooks
from lightning_hanayo.tensor_parallel import product as arithmetic
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from recipes.benchmarks.harness import sleep_until
from recipes.benchmarks.schemes.log import Log


class Device:
    """A real device. What is between the linear layers is simple, for checks: q * k + v, and tanh."""

    def attention(self, qkv: Tensor, seq: int) -> Tensor:
        """[..., 3n], each feature's q, k and v one after the other, to [..., n]."""
        q, k, v = qkv.unflatten(-1, (-1, 3)).unbind(-1)
        combined: Tensor = q * k + v
        return combined

    def activation(self, x: Tensor) -> Tensor:
        """Element by element."""
        return torch.tanh(x)


class Emulated(Device):
    """An emulated device: a product is uninitialized memory, after a sleep.

    Args:
        flops_per_second: its speed.
        log: records what it computes.
        is_dry: whether it doesn't even sleep.
    """

    def __init__(self, flops_per_second: float, log: Log, *, is_dry: bool = False) -> None:
        self._rate = flops_per_second
        self._log = log
        self._is_dry = is_dry

    def spend(self, flops: float) -> None:
        """Sleep as long as this takes."""
        seconds = flops / self._rate
        self._log.compute(seconds)
        if self._is_dry:
            return
        begin = time.monotonic()
        sleep_until(begin + seconds)
        self._log.spans.append((begin, time.monotonic()))

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """[..., K] times [N, K]."""
        self.spend(2.0 * a.numel() * b.shape[0])
        return a.new_empty(*a.shape[:-1], b.shape[0])

    def input_gradient(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """[..., N] times [N, K]."""
        self.spend(2.0 * gradient.numel() * weight.shape[1])
        return gradient.new_empty(*gradient.shape[:-1], weight.shape[1])

    def weight_gradient(self, gradient: Tensor, x: Tensor) -> Tensor:
        """[..., N] and [..., K]."""
        self.spend(2.0 * gradient.numel() * x.shape[-1])
        return gradient.new_empty(gradient.shape[-1], x.shape[-1])

    @override
    def attention(self, qkv: Tensor, seq: int) -> Tensor:
        y: Tensor = _Attention.apply(qkv, self, 4.0 * qkv.numel() / 3 * seq)
        return y

    @override
    def activation(self, x: Tensor) -> Tensor:
        return x

    @contextmanager
    def multiplies(self) -> Iterator[None]:
        """In this context the device computes all products of linear layers."""
        own = {name: getattr(self, name) for name in ("multiply", "input_gradient", "weight_gradient")}
        with patch.multiple(arithmetic, **own):
            yield


class _Attention(torch.autograd.Function):
    """The two products of scores and values: as many flops, twice as many backward."""

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, device: Emulated, flops: float) -> Tensor:
        ctx.device, ctx.flops, ctx.shape = device, flops, qkv.shape
        device.spend(flops)
        return qkv.new_empty(*qkv.shape[:-1], qkv.shape[-1] // 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.device.spend(2 * ctx.flops)
        return gradient.new_empty(ctx.shape), None, None


NAMES = ("qkv", "out", "fc1", "fc2")


def shapes(hidden: int) -> tuple[tuple[int, int], ...]:
    """Returns the shapes of the weights, [out, in]. The rows of qkv are q, k and v of each feature in turn."""
    return (3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)


class Layer(nn.Module):
    """One layer.

    Args:
        linears: the four, in order.
        device: computes what is between them.
        seq: the length of a sequence.
    """

    def __init__(self, linears: Sequence[nn.Module], device: Device, seq: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(linears)
        self.device = device
        self.seq = seq

    def forward(self, x: Tensor) -> Tensor:
        """This rank's part of [batch, seq, hidden] to the same part."""
        qkv, out, fc1, fc2 = self.linears
        x = x + out(self.device.attention(qkv(x), self.seq))
        y: Tensor = x + fc2(self.device.activation(fc1(x)))
        return y


class WholeLinear(nn.Module):
    """A linear layer that isn't parallelized, to compare with."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        return torch.nn.functional.linear(x, self.weight)


class Scheme(ABC):
    """A way to parallelize layers over hosts."""

    @property
    def hooks(self) -> NoHooks | StageContext:
        """What a stage of such layers calls."""
        return NoHooks()

    @abstractmethod
    def linear(self, index: int, weight: Tensor) -> nn.Module:
        """Returns the `index`-th of a layer's four, from its whole weight."""

    @abstractmethod
    def cut(self, x: Tensor) -> Tensor:
        """Returns this rank's part of [batch, seq, hidden]."""

    @abstractmethod
    def cut_weight(self, index: int, weight: Tensor) -> Tensor:
        """Returns this rank's part of a weight, or of its gradient."""

    def begin(self) -> None:  # noqa: B027
        """A step begins."""

    def layers(self, weights: Sequence[Sequence[Tensor]], device: Device, seq: int) -> nn.Sequential:
        """Returns layers one after the other, from whole weights."""
        return nn.Sequential(
            *(Layer([self.linear(i, weight) for i, weight in enumerate(four)], device, seq) for four in weights)
        )

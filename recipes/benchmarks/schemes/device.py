"""What multiplies: a real device uses torch, an emulated one sleeps in proportion to the flops."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.tensor_parallel import product as arithmetic
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

"""A Transformer layer's linear layers and what is between them, however they are parallelized.

x -> qkv -> attention -> out -> + x -> fc1 -> activation -> fc2 -> +        norms, biases and dropout are left out
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_hanayo.pipeline_parallel.stages import NoHooks, StageHooks
from recipes.benchmarks.schemes.device import Device

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
    def hooks(self) -> StageHooks:
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

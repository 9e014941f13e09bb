"""Reads a rank's gradients once, on the device: which of them have NaN or infinite elements."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class GradientLook:
    """A norm of each gradient, on the device. It isn't finite if an element isn't, and else only if it overflows."""

    names: Sequence[str]
    norms: Tensor
    """[gradients]"""

    @staticmethod
    def at(parameters: Mapping[str, nn.Parameter], device: torch.device) -> "GradientLook":
        """Look at the gradients that are there. Norms don't overflow on GPUs."""
        elements = {name: elements_of(p.grad) for name, p in parameters.items() if p.grad is not None}
        gradients = {name: values for name, values in elements.items() if values.numel()}  # else no largest one
        if not gradients:
            return GradientLook((), torch.zeros(0, device=device))
        norm_type = 2.0 if device.type == "cpu" else inf  # on the CPU the largest element takes 15 times as long
        norms = torch._foreach_norm(list(gradients.values()), norm_type)
        return GradientLook(list(gradients), torch.stack([norm.float() for norm in norms]))

    @property
    def flag(self) -> Tensor:
        """1 if a norm isn't finite, else 0; on the device."""
        return self.norms.isfinite().all().logical_not().float()

    def nonfinite(self) -> list[str]:
        """The gradients whose norm isn't finite. The host waits for the device."""
        return [
            name for name, is_finite in zip(self.names, self.norms.isfinite().tolist(), strict=True) if not is_finite
        ]


def elements_of(gradient: Tensor) -> Tensor:
    """The elements of a gradient that are stored."""
    return gradient._values() if gradient.layout is torch.sparse_coo else gradient


class HostFlag:
    """A number of the device, copied to the host without waiting for it."""

    def __init__(self, value: Tensor) -> None:
        self._copy, self._event = value, None
        if value.is_cuda:
            self._copy = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._copy.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> bool:
        """Whether it isn't 0. A step later the device has mostly passed it."""
        if self._event is not None:
            self._event.synchronize()
        return bool(self._copy)

"""The reduction: a stage's gradients summed over the data ranks, started as soon as that stage is done.

    bucket   | gradient of p0 | gradient of p1 | ... | has p0 a gradient? | has p1? | ...      one per dtype

A parameter that one data rank used and another didn't gets the sum; one that nobody used keeps no gradient.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class _Bucket:
    parameters: Sequence[nn.Parameter]
    data: Tensor
    work: dist.Work


class Reduction:
    """Sums gradients over `group`.

    Args:
        parameters: each stage's own parameters; the first stage's include those outside the stack.
        group: the ranks that hold the same stages for other data; None if there is one.
    """

    def __init__(self, parameters: Mapping[int, Sequence[nn.Parameter]], group: dist.ProcessGroup | None) -> None:
        self._parameters = parameters
        self._group = group
        self._under_way: list[_Bucket] = []

    def start(self, stage: int) -> None:
        """Start to sum the gradients of `stage`. Called by all data ranks, for their stages in the same order."""
        if self._group is None:
            return
        trained = sorted((p for p in self._parameters[stage] if p.requires_grad), key=lambda p: str(p.dtype))
        for _, parameters in groupby(trained, key=lambda p: p.dtype):
            bucket = list(parameters)
            data = _fill(bucket)
            self._under_way.append(_Bucket(bucket, data, self._group.allreduce([data])))

    def finish(self) -> None:
        """Wait for all sums and put them into `.grad`."""
        for bucket in self._under_way:
            bucket.work.wait()
            _empty(bucket)
        self._under_way.clear()

    def forget(self) -> None:
        """Drop all that is under way, after a failure."""
        self._under_way.clear()
        self._group = None


def _fill(parameters: Sequence[nn.Parameter]) -> Tensor:
    first = parameters[0]
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    flags = torch.tensor([float(p.grad is not None) for p in parameters], dtype=first.dtype, device=first.device)
    return torch.cat([*(gradient.reshape(-1) for gradient in gradients), flags])


def _empty(bucket: _Bucket) -> None:
    *sums, flags = bucket.data.split([*(p.numel() for p in bucket.parameters), len(bucket.parameters)])
    for i, (parameter, total) in enumerate(zip(bucket.parameters, sums, strict=True)):
        if parameter.grad is not None:
            parameter.grad.copy_(total.view_as(parameter))
        elif flags[i]:
            parameter.grad = total.view_as(parameter).clone()

"""The dense parameters: those that no 3-D layer holds, cut over the whole cube between batches, whole within one.

between    [rows/(x y z), ...]  on each rank: values, gradient, optimizer state
gather     whole values, from before the first micro-batch ...
sum        ... until after the last backward: each rank gets its part of the sum over the cube

One collective per batch and dtype each way, so user code needs none; Parameter objects stay, so ties and names hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.tensor3d.sharding import Cut, Shard


def dense_shard(parameter: Tensor) -> Shard:
    """Cut over the cube by its first dimension."""
    first, *rest = parameter.shape
    return Shard((Cut(first, "xyz", as_one=True), *map(Cut, rest)))


class OutsideParameters:
    """One rank's, of all its stages.

    Args:
        parameters: in the same order on all ranks of the cube; scalars aren't cut, and left out.
        grid: the cube.
        factors: what a parameter's gradient counts in the sum: 1/ranks where all ranks made the same one.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], grid: Mesh, factors: Mapping[Tensor, float]) -> None:
        self._grid = grid
        self._axis = grid.axis("xyz")
        self._factors = factors
        self.parameters = [p for p in parameters if p.dim()]
        self.shards: dict[Tensor, Shard] = {parameter: dense_shard(parameter) for parameter in self.parameters}
        self._found: dict[nn.Parameter, Tensor | None] = {}
        self._parts: dict[nn.Parameter, Tensor] = {}

    def cut(self) -> None:
        """Once, in the beginning: leave this rank's parts."""
        for parameter in self.parameters:
            parameter.data = self.shards[parameter].of(parameter.data, self._grid)

    def gather(self) -> None:
        """Before a batch: whole values, and no gradients; those found are kept for `scatter`."""
        self._found = {parameter: parameter.grad for parameter in self.parameters}
        for parameters in _by_dtype(self.parameters):
            parts = [self._padded(parameter, parameter.data) for parameter in parameters]
            arrived = self._axis.all_gather(torch.cat([part.reshape(-1) for part in parts])).wait()
            columns = arrived.split([part.numel() for part in parts], 1)
            for parameter, part, column in zip(parameters, parts, columns, strict=True):
                whole = column.reshape(-1, *part.shape[1:])[: self.shards[parameter].shape[0]]
                self._parts[parameter] = parameter.data
                parameter.grad = None
                parameter.data = whole

    def scatter(self) -> None:
        """After a batch: this rank's parts again, of the sums of the gradients as well."""
        used = self._used()
        for parameters in _by_dtype([p for p in self.parameters if p in used]):
            sums = self._sums(parameters)
            for parameter, total in zip(parameters, sums, strict=True):
                self._leave(parameter, total)
        for parameter in self.parameters:
            if parameter not in used:
                self._leave(parameter, None)
        self._found, self._parts = {}, {}

    def forget(self) -> None:
        """After a failure: this rank's parts again, and no gradients."""
        for parameter, part in self._parts.items():
            parameter.grad = None
            parameter.data = part
        self._found, self._parts = {}, {}

    def _used(self) -> set[nn.Parameter]:
        """Those with a gradient on any rank: what nobody used keeps none."""
        if not self.parameters or not torch.is_grad_enabled():
            return set()
        device = self.parameters[0].device
        flags = torch.tensor([float(p.grad is not None) for p in self.parameters], device=device)
        counts = self._axis.all_reduce(flags).wait().tolist()
        return {parameter for parameter, count in zip(self.parameters, counts, strict=True) if count}

    def _sums(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        size, gradients = self._axis.size, []
        for parameter in parameters:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient = gradient * self._factors.get(parameter, 1.0)
            missing = gradient.new_zeros(-len(gradient) % size, *gradient.shape[1:])
            gradients.append(torch.cat([gradient, missing]).reshape(size, -1))
            parameter.grad = None
        arrived = self._axis.reduce_scatter(torch.cat(gradients, 1)).wait()
        return list(arrived.split([gradient.shape[1] for gradient in gradients]))

    def _leave(self, parameter: nn.Parameter, total: Tensor | None) -> None:
        part, found = self._parts[parameter], self._found[parameter]
        parameter.grad = None
        parameter.data = part
        if total is None:
            parameter.grad = found
        else:
            gradient = total.view(-1, *part.shape[1:])[: len(part)]
            parameter.grad = gradient if found is None else found.add_(gradient)

    def _padded(self, parameter: Tensor, part: Tensor) -> Tensor:
        rows = -(-self.shards[parameter].shape[0] // self._axis.size)
        return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    ordered = sorted(parameters, key=lambda p: str(p.dtype))
    return [list(group) for _, group in groupby(ordered, key=lambda p: p.dtype)]

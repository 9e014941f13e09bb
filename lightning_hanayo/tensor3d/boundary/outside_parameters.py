"""Parameters that no 3-D layer holds: sharded over the whole cube between batches, whole during one.

between batches    [rows/(x y z), ...] on each rank: values, gradient, optimizer state
all_gather         whole values, from before the first micro-batch ...
reduce_scatter     ... until after the last backward: each rank gets its shard of the gradients' sum over the cube

They are the embedding, the head, and in generic blocks whatever isn't converted. One collective per batch and dtype
each way, so the user's code needs none. The `Parameter` objects stay, so ties and names hold.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from lightning_hanayo.tensor3d.collectives import padded, split_dim
from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.tensor3d.sharding import DimShard, Shard


def outside_shard(parameter: Tensor) -> Shard:
    """Returns how a parameter is sharded: over the cube, by its first dimension."""
    first, *rest = parameter.shape
    return Shard((DimShard(first, "xyz", as_one=True), *map(DimShard, rest)))


class OutsideParameters:
    """Those of all stages of one rank.

    Args:
        parameters: in the same order on all ranks of the cube. Scalars can't be sharded, and are left out.
        mesh: the cube.
        factors: a parameter's weight in the sum of gradients: 1/ranks where all ranks compute the same gradient.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: Mesh, factors: Mapping[Tensor, float]) -> None:
        self._mesh = mesh
        self._axis = mesh.axis("xyz")
        self._factors = factors
        self.parameters = [p for p in parameters if p.dim()]
        self.shards: dict[Tensor, Shard] = {parameter: outside_shard(parameter) for parameter in self.parameters}
        self._old_gradients: dict[nn.Parameter, Tensor | None] = {}
        self._local: dict[nn.Parameter, Tensor] = {}

    def shard(self) -> None:
        """Called once, at the start: keep this rank's shards."""
        for parameter in self.parameters:
            parameter.data = self.shards[parameter].of(parameter.data, self._mesh)

    def all_gather(self) -> None:
        """Before a batch: whole values, and no gradients. Earlier batches' gradients are kept for `reduce_scatter`."""
        self._old_gradients = {parameter: parameter.grad for parameter in self.parameters}
        for parameters in _by_dtype(self.parameters):
            parts = [padded(p.data, 0, -(-self.shards[p].shape[0] // self._axis.size)) for p in parameters]
            gathered = self._axis.all_gather(torch.cat([part.reshape(-1) for part in parts])).wait()
            columns = gathered.split([part.numel() for part in parts], 1)
            for parameter, part, column in zip(parameters, parts, columns, strict=True):
                whole = column.reshape(-1, *part.shape[1:])[: self.shards[parameter].shape[0]]
                self._local[parameter] = parameter.data
                parameter.grad = None
                parameter.data = whole

    def is_whole(self, parameter: Tensor) -> bool:
        """Whether a batch is running, for which this parameter was gathered."""
        return parameter in self._local

    def reduce_scatter(self) -> None:
        """After a batch: this rank's shards again, of values and of the gradients' sums."""
        used = self._used()
        for parameters in _by_dtype([p for p in self.parameters if p in used]):
            sums = self._sums(parameters)
            for parameter, total in zip(parameters, sums, strict=True):
                self._restore(parameter, total)
        for parameter in self.parameters:
            if parameter not in used:
                self._restore(parameter, None)
        self._old_gradients, self._local = {}, {}

    def discard(self) -> None:
        """After a failure: this rank's shards again, and no gradients."""
        for parameter, part in self._local.items():
            parameter.grad = None
            parameter.data = part
        self._old_gradients, self._local = {}, {}

    def _used(self) -> set[nn.Parameter]:
        """Returns those with a gradient on any rank. A parameter that no rank used gets no gradient."""
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
            gradients.append(split_dim(gradient * self._factors.get(parameter, 1.0), size, 0).flatten(1))
            parameter.grad = None
        summed = self._axis.reduce_scatter(torch.cat(gradients, 1)).wait()
        return list(summed.split([gradient.shape[1] for gradient in gradients]))

    def _restore(self, parameter: nn.Parameter, total: Tensor | None) -> None:
        part, old = self._local[parameter], self._old_gradients[parameter]
        parameter.grad = None
        parameter.data = part
        if total is not None:
            gradient = total.view(-1, *part.shape[1:])[: len(part)]
            old = gradient if old is None else old.add_(gradient)
        parameter.grad = old


def _by_dtype(parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    ordered = sorted(parameters, key=lambda p: str(p.dtype))
    return [list(group) for _, group in groupby(ordered, key=lambda p: p.dtype)]

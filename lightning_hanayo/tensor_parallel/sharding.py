"""How a parameter is sharded: which entries of the whole tensor a rank of the mesh holds.

W [8, 4] of a column-parallel layer on the mesh (2, 2, 1), sharded over ("yx", "z"):   rows 0..3 at y=0, of these 0..1
                                                                                       at x=0

A fused q, k, v with 2 heads over y has order = q0 k0 v0 q1 k1 v1, so that rank y finds the rows of its heads together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from lightning_hanayo.tensor_parallel.mesh import Mesh


@dataclass(frozen=True)
class DimShard:
    """How one dimension is sharded: along the first of `axes`, each part again along the next one.

    Args:
        size: the size of the whole dimension.
        axes: "" for a dimension that isn't sharded.
        order: the entries in the order in which they are dealt out; None: as they are.
        as_one: whether the axes count as one: a size that doesn't divide is rounded up once, not along each axis.
    """

    size: int
    axes: str = ""
    order: tuple[int, ...] | None = None
    as_one: bool = False

    def span(self, mesh: Mesh, coordinates: Sequence[int] | None = None) -> tuple[int, int]:
        """Returns where a rank's part starts and stops in the order.

        Parts of a size that doesn't divide are rounded up, so that the last ones may be smaller.
        """
        start, stop, part = 0, self.size, self.size
        for name in (self.axes,) if self.as_one else self.axes:
            part = -(-part // mesh.size(name))
            start = min(stop, start + part * mesh.index(name, coordinates))
            stop = min(stop, start + part)
        return start, stop

    def entries_at(self, mesh: Mesh, coordinates: Sequence[int] | None = None) -> Tensor:
        """Returns the entries that the rank at `coordinates` holds, [local size]."""
        start, stop = self.span(mesh, coordinates)
        return torch.arange(start, stop) if self.order is None else torch.tensor(self.order[start:stop])


@lru_cache
def fused_order(sizes: tuple[int, ...], num_ranks: int) -> tuple[int, ...]:
    """Returns the entries of fused parts of these sizes in an order that keeps each rank's together."""
    parts = [(sum(sizes[:i]), size // num_ranks) for i, size in enumerate(sizes)]
    return tuple(start + rank * n + j for rank in range(num_ranks) for start, n in parts for j in range(n))


@dataclass(frozen=True)
class Shard:
    """How a parameter is sharded, one `DimShard` per dimension. Ranks that differ along other axes are replicas.

    Args:
        dims: of each dimension.
        partial: the axes along which the gradient that the backward leaves is still a partial sum.
    """

    dims: tuple[DimShard, ...]
    partial: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(dim.size for dim in self.dims)

    @property
    def axes(self) -> str:
        """All axes that it is sharded over."""
        return "".join(dim.axes for dim in self.dims)

    def replicas(self, mesh: Mesh) -> int:
        """Returns how many ranks hold the same part."""
        return mesh.num_ranks // mesh.size(self.axes)

    def local_shape(self, mesh: Mesh, coordinates: Sequence[int] | None = None) -> tuple[int, ...]:
        """Returns the shape of the part at `coordinates`, or of this rank's part if None."""
        return tuple(stop - start for start, stop in (dim.span(mesh, coordinates) for dim in self.dims))

    def of(self, whole: Tensor, mesh: Mesh, coordinates: Sequence[int] | None = None) -> Tensor:
        """Returns the part of `whole` at `coordinates` (this rank's if None), in memory of its own.

        A tensor of another shape is sharded along the dimensions whose sizes agree. A scalar stays whole.
        """
        own = zip(self.dims, self._index(mesh, coordinates), whole.shape, strict=False)
        index = tuple(one if size == dim.size else slice(None) for dim, one, size in own)
        return whole[index].clone(memory_format=torch.contiguous_format)

    def put(self, whole: Tensor, part: Tensor, mesh: Mesh, coordinates: Sequence[int]) -> None:
        """Write the `part` of the rank at `coordinates` into `whole`."""
        whole[self._index(mesh, coordinates)] = part

    def _index(self, mesh: Mesh, coordinates: Sequence[int] | None) -> tuple[slice | Tensor, ...]:
        """The rank's entries along each dimension, of which at most one is dealt out in an order of its own."""
        return tuple(
            slice(*dim.span(mesh, coordinates)) if dim.order is None else dim.entries_at(mesh, coordinates)
            for dim in self.dims
        )


def all_gather_whole(part: Tensor, shard: Shard, mesh: Mesh, device: torch.device | None = None) -> Tensor:
    """Gather the ranks' shards into the whole tensor, on `device` (the part's if None). Called by all ranks."""
    shapes = [torch.Size(shard.local_shape(mesh, place)) for place in mesh.places]
    flat = part.new_zeros(max(shape.numel() for shape in shapes))
    flat[: part.numel()] = part.detach().reshape(-1)
    gathered = mesh.axis("xyz").all_gather(flat).wait().to(device or part.device)
    whole = gathered.new_empty(shard.shape)
    for place, shape, own in zip(mesh.places, shapes, gathered, strict=True):
        shard.put(whole, own[: shape.numel()].view(shape), mesh, place)
    return whole


def reduce_scatter_whole(gradient: Tensor, shard: Shard, mesh: Mesh) -> Tensor:
    """The sum over all ranks of a gradient of the whole tensor, this rank's part of it. Called by all ranks.

    Where a partial sum is expected, which is summed over some axes after the batch, each of their ranks gets its share.
    """
    parts = [shard.of(gradient, mesh, place).reshape(-1) for place in mesh.places]
    longest = max(len(part) for part in parts)
    padded = torch.stack([pad(part, (0, longest - len(part))) for part in parts])
    shape = torch.Size(shard.local_shape(mesh))
    own = mesh.axis("xyz").reduce_scatter(padded).wait()[: shape.numel()].view(shape)
    return own.new_empty(shape).copy_(own / mesh.size(shard.partial))  # autograd expects the shard's own strides


@lru_cache
def sharded_class(sharded: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass of both: a 3-D layer that is still an instance of the class it was converted from."""
    return type(f"{original.__name__}3D", (sharded, original), {"__doc__": f"A 3-D parallel {original.__name__}."})


def shards_of(module: nn.Module) -> dict[str, Shard]:
    """How each of the module's own parameters is sharded, by name; empty if they are not."""
    shards: dict[str, Shard] = vars(module).get("_shards", {})
    return shards


def shard_module(module: Any, kind: type[nn.Module], shards: dict[str, Shard], mesh: Mesh, **attributes: Any) -> None:
    """Make a module one of this kind, with these attributes, of whose parameters this rank keeps shards.

    Its class is replaced, not the module: blocks, ties and state dicts refer to this object and its parameters.
    """
    if not isinstance(module, kind):
        module.__class__ = kind
    vars(module).update(attributes)
    module._shards = {name: shard for name, shard in shards.items() if module._parameters.get(name) is not None}
    for name, shard in module._shards.items():
        parameter = module._parameters[name]
        parameter.data = shard.of(parameter.data, mesh)


def all_reduce_partial_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Sum the gradients that a backward leaves as partial sums: those of biases and norms.

    For models that are built of 3-D layers and train without `HanayoStrategy`. All ranks of the mesh call it once per
    batch, before the optimizer step.
    """
    for module in model.modules():
        for name, shard in shards_of(module).items():
            parameter = module._parameters.get(name)
            if shard.partial and parameter is not None and parameter.grad is not None:
                parameter.grad = mesh.axis(shard.partial).all_reduce(parameter.grad.contiguous()).wait()

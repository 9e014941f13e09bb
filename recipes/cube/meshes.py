"""The mesh that communicates least for a Transformer layer: all meshes of so many ranks that fit it, ranked."""

from dataclasses import dataclass
from math import prod
from typing import Literal

from lightning_hanayo.divisibility import Divisibility, MeshSizes, meshes_that_fit
from lightning_hanayo.planner.communication_volume import LinearLayer, Storage, Volume

Keep = Literal["gathered", "shards"]
"""what a product saves for its backward: what it gathered, or this rank's shards, which are gathered again"""


@dataclass(frozen=True)
class TransformerLayer:
    """Attention and a feed-forward network: q, k, v | out | up | down, of which out and down are row-parallel.

    Args:
        tokens: M, the tokens of one micro-batch.
        hidden: h, the features of the residual stream.
        heads: of the attention.
        feed_forward: inner features of the feed-forward network, as a multiple of h.
    """

    tokens: int
    hidden: int
    heads: int
    feed_forward: float = 4.0

    @property
    def features(self) -> int:
        """Inner features of the feed-forward network."""
        return round(self.feed_forward * self.hidden)

    @property
    def linears(self) -> tuple[LinearLayer, ...]:
        """Its linear layers, in order."""
        m, h, f = self.tokens, self.hidden, self.features
        return (
            LinearLayer(m, h, 3 * h),
            LinearLayer(m, h, h, row_parallel=True),
            LinearLayer(m, h, f),
            LinearLayer(m, f, h, row_parallel=True),
        )

    def volume(self, mesh: MeshSizes, keep: Keep = "gathered") -> Volume:
        """Returns what a rank receives. Attention itself receives nothing, since each rank has whole heads."""
        found = [linear.volume(mesh) for linear in self.linears]
        again = [Volume(gather_x=one.gather_x, gather_w=one.gather_w) for one in found if keep == "shards"]
        return sum((*found, *again), Volume())

    def storage(self, mesh: MeshSizes, keep: Keep = "gathered") -> Storage:
        """Returns what a rank stores of its linear layers."""
        found = [linear.storage(mesh) for linear in self.linears]
        if keep == "shards":
            inputs = (linear.sizes[0] / prod(mesh) for linear in self.linears)
            found = [Storage(one.weights, own) for one, own in zip(found, inputs, strict=True)]
        return sum(found, Storage())

    def hops(self, mesh: MeshSizes, keep: Keep = "gathered") -> int:
        """Returns how many messages its collectives send one after the other."""
        return sum(_hops(linear, mesh, keep) for linear in self.linears)


def _hops(linear: LinearLayer, mesh: MeshSizes, keep: Keep) -> int:
    x, y, z = (mesh[0], mesh[2], mesh[1]) if linear.row_parallel else mesh
    again = keep == "shards"
    return (2 + again) * (x - 1 + y - 1) + 2 * (z - 1)


def divisibility_of(layer: TransformerLayer, name: str = "layer") -> tuple[Divisibility, ...]:
    """Returns what must divide for a Transformer layer whose residual stream is sharded along the sequence."""
    return (
        Divisibility(name, "heads", layer.heads, "yz"),
        Divisibility(name, "hidden features", layer.hidden, "z"),
        Divisibility(name, "features", layer.features, "yz"),
    )


def ranked_meshes(num_ranks: int, layer: TransformerLayer, keep: Keep = "gathered") -> tuple[MeshSizes, ...]:
    """Returns all meshes that fit `layer`, the one with the least volume first; equals by storage, then by latency."""

    def cost(mesh: MeshSizes) -> tuple[float, float, int]:
        return round(layer.volume(mesh, keep).total), round(layer.storage(mesh, keep).total), layer.hops(mesh, keep)

    return tuple(sorted(meshes_that_fit(num_ranks, divisibility_of(layer)), key=cost))


def best_mesh(num_ranks: int, layer: TransformerLayer, keep: Keep = "gathered") -> MeshSizes:
    """Returns the first of them. There is always one: (P, 1, 1), which communicates only weights.

    Example:
        >>> best_mesh(8, TransformerLayer(tokens=16384, hidden=4096, heads=32))
        (4, 2, 1)
    """
    return ranked_meshes(num_ranks, layer, keep)[0]

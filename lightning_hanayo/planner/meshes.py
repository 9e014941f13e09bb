"""Ranks the meshes of so many ranks by what they communicate for a Transformer layer."""

from lightning_hanayo.divisibility import Divisibility, MeshSizes, meshes_that_fit
from lightning_hanayo.planner.communication_volume import Keep, TransformerLayer


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

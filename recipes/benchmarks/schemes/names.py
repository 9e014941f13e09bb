"""The names of the schemes, the groups of hosts that each needs, and the function that makes it.

1-d sequence    1-d all-reduce    2-d    3-d 2,2,2    3-d 2,2,2 in 4 (pieces of each product)
3-d 2,2,2, kept (weights are gathered once a batch)
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import isqrt, prod
from typing import TYPE_CHECKING

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from lightning_hanayo.overlap.link_queue import LinkQueue
    from recipes.benchmarks.schemes.layer import Scheme
    from recipes.benchmarks.schemes.log import Log

ONE_D = ("1-d sequence", "1-d all-reduce")
TWO_D = "2-d"
Group = tuple[int, ...]
Find = Callable[[Sequence[Group]], "ProcessGroup | None"]
"""returns this host's group among disjoint groups; None for a dry run"""


_KEPT = ", kept"


def three_d(sizes: Sequence[int], num_pieces: int = 1, *, keep_weights: bool = False) -> str:
    """Returns the name of 3-D on a mesh.

    Example:
        >>> three_d((4, 2, 1))
        '3-d 4,2,1'
    """
    name = f"3-d {','.join(map(str, sizes))}" + (f" in {num_pieces}" if num_pieces > 1 else "")
    return name + _KEPT * keep_weights


def keeps_weights(name: str) -> bool:
    """Returns whether a scheme of this name gathers weights once a batch."""
    return name.endswith(_KEPT)


def mesh_of(name: str) -> tuple[int, int, int]:
    """Returns the mesh of such a name.

    Raises:
        HanayoError: it names no scheme.
    """
    try:
        x, y, z = map(int, name.removeprefix("3-d ").removesuffix(_KEPT).partition(" in ")[0].split(","))
    except ValueError:
        raise HanayoError(f"{name!r} is no scheme: expected {', '.join((*ONE_D, TWO_D))} or 3-d x,y,z") from None
    return x, y, z


def groups(name: str, hosts: int) -> dict[str, list[Group]]:
    """Returns the groups along each axis, by its name.

    Raises:
        HanayoError: the scheme isn't made for so many hosts.
    """
    if name in ONE_D:
        return {"all": [tuple(range(hosts))]}
    if name == TWO_D:
        side = isqrt(hosts)
        if side**2 != hosts:
            raise HanayoError(f"{name} needs a square of hosts, got {hosts}")
        rows = [tuple(range(side * i, side * i + side)) for i in range(side)]
        return {"row": rows, "column": list(zip(*rows, strict=True))}
    sizes = mesh_of(name)
    if prod(sizes) != hosts:
        raise HanayoError(f"{name} has {prod(sizes)} hosts, got {hosts}")
    topology = Topology(cube=sizes)
    return {axis: [tuple(group) for group in topology.groups(axis)] for axis in "xyz"}


def make(name: str, hosts: int, rank: int, find: Find, log: "Log", queue: "LinkQueue | None" = None) -> "Scheme":
    """Returns the scheme as host `rank` sees it, whose transfers go through the `queue`, if there is one."""
    from lightning_hanayo.tensor_parallel.mesh import Mesh
    from recipes.benchmarks.schemes.dimensions import OneD, ThreeD, TwoD, Wire, wires

    along = groups(name, hosts)

    def wire(axis: str) -> Wire:
        own = next(group for group in along[axis] if rank in group)
        return Wire(find(along[axis]) if len(own) > 1 else None, len(own), own.index(rank), log, queue)

    if name in ONE_D:
        return OneD(wire("all"), by_sequence=name == ONE_D[0])
    if name == TWO_D:
        return TwoD(wire("row"), wire("column"))
    mesh = Mesh(mesh_of(name), rank, partial(_of_axis, along, find), wires(log), queue=queue)
    return ThreeD(
        mesh,
        int(name.removesuffix(_KEPT).partition(" in ")[2] or 1),
        turns=None if queue is None else queue.turns,
        keep_weights=keeps_weights(name),
    )


def _of_axis(along: dict[str, list[Group]], find: Find, axes: str) -> "ProcessGroup | None":
    """Linear layers need single axes only."""
    return find(along[axes]) if axes in along else None

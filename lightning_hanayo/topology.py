"""Maps ranks to coordinates on the axes (data, pipe, x, y, z), and lists the groups of ranks along each axis.

world = data x pipe x (x y z)          rank = (data * P + pipe) * xyz + cube

D = 2, P = 2, cube (1, 1, 1):          pipe 0   pipe 1
                              data 0      0        1
                              data 1      2        3
"""

from dataclasses import dataclass
from math import prod

from lightning_hanayo.errors import HanayoError

AXES = ("data", "pipe", "x", "y", "z")
MAX_RANKS = 1_000_000
"""of a world: more are a mistake, and lists of so many take a second"""


@dataclass(frozen=True)
class Topology:
    """The sizes of the five axes. It holds no process group and no rank.

    Example:
        >>> Topology(data=2, pipe=2).group_of(3, "pipe")
        (2, 3)
    """

    data: int = 1
    pipe: int = 1
    cube: tuple[int, int, int] = (1, 1, 1)

    def __post_init__(self) -> None:
        for name, size in (("data", self.data), ("pipe", self.pipe), *zip("xyz", self.cube, strict=True)):
            if size < 1:
                raise HanayoError(f"the {name} axis has size {size}; every axis has at least one rank")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of `AXES`."""
        return (self.data, self.pipe, *self.cube)

    @property
    def world_size(self) -> int:
        """The number of all ranks."""
        return prod(self.sizes)

    @property
    def replica_size(self) -> int:
        """The number of ranks that train one copy of the model together."""
        return self.world_size // self.data

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """The coordinates of `rank`, one per axis in the order of `AXES`."""
        coordinates = []
        for size in reversed(self.sizes):
            rank, coordinate = divmod(rank, size)
            coordinates.append(coordinate)
        return tuple(reversed(coordinates))

    def place(self, rank: int) -> str:
        """Where `rank` is, for messages.

        Example:
            >>> Topology(data=2, pipe=2).place(3)
            'pipeline 1, data 1'
        """
        data, pipe, *cube = self.coordinates(rank)
        named = [f"pipeline {pipe}"]
        if self.data > 1:
            named.append(f"data {data}")
        if prod(self.cube) > 1:
            named.append(f"cube {tuple(cube)}")
        return ", ".join(named)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups of ranks that differ only along `axes`, each in rank order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            place = zip(AXES, self.coordinates(rank), strict=True)
            groups.setdefault(tuple(i for axis, i in place if axis not in axes), []).append(rank)
        return tuple(map(tuple, groups.values()))

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group among `groups(*axes)` that contains `rank`."""
        return next(group for group in self.groups(*axes) if rank in group)


def resolve(
    world_size: int,
    *,
    pipeline_parallel_size: int | str = "auto",
    data_parallel_size: int | str = "auto",
    cube: int | tuple[int, int, int] = 1,
) -> Topology:
    """The topology of `world_size` ranks. A size of `"auto"` follows from the others; if both are, `data` is 1.

    Raises:
        HanayoError: `world_size` is above `MAX_RANKS`, or not the product of the sizes; then the message names the
            nearest sizes that fit.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise HanayoError(f"{world_size:,} processes (devices x num_nodes): expected 1 to {MAX_RANKS:,}")
    cube_xyz = cube_sizes(cube)
    pipe, data = pipeline_parallel_size, data_parallel_size
    if pipe == "auto" and data == "auto":
        data = 1
    known = prod(size for size in (pipe, data, *cube_xyz) if isinstance(size, int))
    left, rest = divmod(world_size, known) if known > 0 else (0, 1)
    if pipe == "auto":
        pipe = left
    elif data == "auto":
        data = left
    elif left != 1:
        rest = 1
    if rest or left < 1:
        raise HanayoError(_mismatch(world_size, pipeline_parallel_size, data_parallel_size, cube_xyz))
    return Topology(int(data), int(pipe), cube_xyz)


def cube_sizes(cube: int | tuple[int, int, int]) -> tuple[int, int, int]:
    """The sizes of the axes x, y and z of a cube that is given by them, or by one size for all."""
    return (cube, cube, cube) if isinstance(cube, int) else (cube[0], cube[1], cube[2])


def _mismatch(world_size: int, pipe: int | str, data: int | str, cube_xyz: tuple[int, ...]) -> str:
    cube, wanted = prod(cube_xyz), pipe if isinstance(pipe, int) else 1
    fitting = [p for p in range(1, world_size + 1) if cube > 0 and world_size % (cube * p) == 0]
    nearest = sorted(fitting, key=lambda p: (abs(p - wanted), p))[:3]
    choices = [f"pipeline_parallel_size={p} with data_parallel_size={world_size // (cube * p)}" for p in nearest]
    shape = "auto" if cube == 1 else "x".join(map(str, cube_xyz))
    given = {"pipeline_parallel_size": pipe, "data_parallel_size": data, "cube": shape}
    sizes = " x ".join(f"{name}={size}" for name, size in given.items() if size != "auto")
    needed, multiple = prod(one for one in (pipe, data, cube) if isinstance(one, int)), "auto" in (pipe, data)
    text = f"{sizes} needs {'a multiple of ' * multiple}{needed} processes, but devices x num_nodes is {world_size}"
    if world_size == 1 and needed > 1:
        return f"{text}: say devices={needed}."
    return f"{text}. These fit: {', '.join(choices)}." if choices else f"{text}."

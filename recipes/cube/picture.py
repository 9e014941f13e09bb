"""Draws a linear layer over a 3-D mesh of ranks: what each rank holds, and what one rank gathers, sums and keeps.

  the ranks      |   W   [in/z, out/(y x)]       X is left of Y, and W above it, as for a product by hand: rows of X
-----------------+-------------------------      times columns of W are a block of Y
  X              |   Y
  [x, y | in/z]  |   [x | out/(y z)]
"""

from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting.palette import DARK
from lightning_hanayo.plotting.timeline import image_file
from lightning_hanayo.topology import Topology

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Box = tuple[float, float, float, float]
"""left, top, width, height"""

_WIDTH, _HEIGHT = 9.8, 8.0
_M, _K, _N = 2.8, 1.9, 4.8
"""inches: the whole picture, and in it tokens, in-features and out-features"""
_LEFT, _TOP, _BETWEEN = 1.5, 1.15, 1.4
_SOFT = "#6f6b66"


def save_cube(path: str | Path, sizes: MeshSizes = (2, 2, 2), rank: int = 0) -> None:
    """Save the picture of a column-parallel linear layer as `rank` sees it. Readable up to about 16 ranks.

    Example:
        >>> save_cube("cube.png", (1, 2, 2), rank=3)

    Args:
        path: the file, ending in .png, .svg or .pdf.
        sizes: the mesh's.
        rank: the rank whose part is highlighted.

    Raises:
        HanayoError: there is no such rank, the suffix names no picture format, or the file can't be written.
    """
    if not 0 <= rank < prod(sizes):
        raise HanayoError(f"rank {rank} isn't in the cube {sizes}, which has the ranks 0 to {prod(sizes) - 1}")
    mesh = _Mesh(Topology(cube=sizes), rank)
    with image_file(path, _WIDTH, _HEIGHT) as figure:
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set(xlim=(0, _WIDTH), ylim=(_HEIGHT, 0))
        axes.axis("off")
        _draw_ranks(axes, mesh)
        right, middle = _LEFT + _K + _BETWEEN, _TOP + _K + _BETWEEN
        for matrix, box in (
            (_Matrix("1  X gathered", "[batch/x, seq/y, in/z]", "xy", "z", "y"), (_LEFT, middle, _K, _M)),
            (_Matrix("2  W gathered", "[out/(y x), in/z], drawn transposed", "z", "yx", "x"), (right, _TOP, _N, _K)),
            (_Matrix("3  Y multiplied, summed", "[batch/x, seq, out/(y z)]", "x", "yz", "z"), (right, middle, _N, _M)),
        ):
            _draw_matrix(axes, mesh, matrix, box)
        text = (
            f"Thick: what rank {rank} holds. Dashed: what it computes with.\nIn the backward dY is gathered along z, "
            "dX summed along y, dW summed along x.\nIn the row-parallel layer that follows y and z trade roles: its "
            "output is sharded as X is."
        )
        axes.text(0.4, _HEIGHT - 0.38, text, fontsize=10, va="center", linespacing=1.5)


@dataclass(frozen=True)
class _Mesh:
    """The mesh, and the rank that is highlighted."""

    topology: Topology
    rank: int

    def at(self, rank: int) -> tuple[int, ...]:
        """Returns the coordinates x, y, z of a rank."""
        return self.topology.coordinates(rank)[2:]

    def size(self, axis: str) -> int:
        return self.topology.cube["xyz".index(axis)]

    def colour(self, rank: int, strength: float = 1.0) -> tuple[float, float, float]:
        """Returns a hue for each (y, z), in a shade for each x. `strength` below 1 is paler."""
        x, y, z = self.at(rank)
        num_x, num_y, num_z = self.topology.cube
        hue = 0.58 + (y * num_z + z) / (num_y * num_z)
        light = 0.6 + 0.16 * x / max(1, num_x - 1)
        return hls_to_rgb(hue % 1, 1 - (1 - light) * strength, 0.45)


@dataclass(frozen=True)
class _Matrix:
    """A matrix whose rows and columns are sharded over these axes, the last of which runs fastest."""

    title: str
    shape: str
    rows: str
    columns: str
    collective: str
    """the axis along which it is communicated"""

    def cells(self, mesh: _Mesh, box: Box) -> Iterator[tuple[int, Box]]:
        """Yields each rank with the box of its part."""
        left, top, width, height = box
        width /= prod(map(mesh.size, self.columns))
        height /= prod(map(mesh.size, self.rows))
        for rank in range(mesh.topology.world_size):
            row, column = _index(mesh, rank, self.rows), _index(mesh, rank, self.columns)
            yield rank, (left + column * width, top + row * height, width, height)


def _index(mesh: _Mesh, rank: int, axes: str) -> int:
    """Returns a rank's index along several axes taken as one, the last of which runs fastest."""
    index = 0
    for axis in axes:
        index = index * mesh.size(axis) + mesh.at(rank)["xyz".index(axis)]
    return index


def _draw_matrix(axes: "Axes", mesh: _Mesh, matrix: _Matrix, box: Box) -> None:
    left, top, _, _ = box
    group = mesh.topology.group_of(mesh.rank, matrix.collective)
    by = f" by {', '.join(map(str, group))}" if len(group) > 1 else ": nothing to do"
    axes.text(left, top - 0.95, f"{matrix.title} along {matrix.collective}{by}", weight="bold", fontsize=12)
    axes.text(left, top - 0.7, matrix.shape, fontsize=11, color=_SOFT)
    cells = dict(matrix.cells(mesh, box))
    for rank, (x, y, width, height) in cells.items():
        is_own, is_in_group = rank == mesh.rank, rank in group
        colour = mesh.colour(rank, 1.0 if is_own else 0.75 if is_in_group else 0.28)
        _draw_box(axes, (x, y, width, height), facecolor=colour, edgecolor="white", zorder=2)
        weight, ink = "bold" if is_own else "normal", DARK if is_in_group else _SOFT
        axes.text(
            x + width / 2, y + height / 2, str(rank), ha="center", va="center", color=ink, weight=weight, fontsize=12
        )
    outline = {"facecolor": "none", "edgecolor": DARK, "zorder": 4}
    _draw_box(axes, _around([cells[rank] for rank in group]), linewidth=1.8, linestyle=(0, (4, 2)), **outline)
    _draw_box(axes, cells[mesh.rank], linewidth=2.6, **outline)
    _draw_edges(axes, mesh, matrix, box)


def _draw_edges(axes: "Axes", mesh: _Mesh, matrix: _Matrix, box: Box) -> None:
    """Label the axes that rows and columns are sharded over, the outer axis further out."""
    left, top, width, height = box
    for names, vertical in ((matrix.rows, True), (matrix.columns, False)):
        shown = [name for name in names if mesh.size(name) > 1]
        parts = 1
        for depth, name in enumerate(shown):
            parts *= mesh.size(name)
            away = 0.2 + 0.24 * (len(shown) - 1 - depth)
            for part in range(parts):
                along = (part + 0.5) / parts
                position = (left - away, top + along * height) if vertical else (left + along * width, top - away)
                _label(axes, *position, f"{name}={part % mesh.size(name)}", vertical=vertical)


def _draw_ranks(axes: "Axes", mesh: _Mesh) -> None:
    """Draw the ranks as small cubes, one plane for each x."""
    num_x, num_y, num_z = mesh.topology.cube
    step = min(0.85, 1.9 / num_y, (3.4 - 0.3 * num_x) / (num_x * num_z))
    side, depth = 0.62 * step, 0.2 * step
    shift, rise = num_z * step + 0.3, 0.3
    left, top = 0.75, 0.75 + depth + (num_x - 1) * rise
    for rank in reversed(range(mesh.topology.world_size)):
        x, y, z = mesh.at(rank)
        front = left + x * shift + z * step, top - x * rise + y * step, side, side
        _draw_small_cube(axes, mesh, rank, front, depth)
    for x in range(num_x):
        _label(axes, left + x * shift + num_z * step / 2, top - x * rise - depth - 0.18, f"x={x}")
    for y in range(num_y):
        _label(axes, left - 0.2, top + y * step + side / 2, f"y={y}", vertical=True)
    for z in range(num_z):
        _label(axes, left + z * step + side / 2, top + num_y * step - 0.05, f"z={z}")


def _draw_small_cube(axes: "Axes", mesh: _Mesh, rank: int, front: Box, d: float) -> None:
    """Draw the front with the rank's number, and the top and the right side, which go back by `d`."""
    from matplotlib.patches import Polygon

    x, y, a, _ = front
    top = [(x, y), (x + d, y - d), (x + a + d, y - d), (x + a, y)]
    right = [(x + a, y), (x + a + d, y - d), (x + a + d, y + a - d), (x + a, y + a)]
    for shade, points in ((0.55, top), (0.8, right)):
        axes.add_patch(Polygon(points, facecolor=mesh.colour(rank, shade), edgecolor="white", linewidth=0.8))
    edge, line, weight = (DARK, 2.6, "bold") if rank == mesh.rank else ("white", 0.8, "normal")
    _draw_box(axes, front, facecolor=mesh.colour(rank), edgecolor=edge, linewidth=line)
    axes.text(x + a / 2, y + a / 2, str(rank), ha="center", va="center", fontsize=11, weight=weight)


def _around(boxes: Sequence[Box]) -> Box:
    """Returns a box a little larger than all of these together."""
    left, top = min(box[0] for box in boxes) - 0.05, min(box[1] for box in boxes) - 0.05
    right, bottom = max(x + width for x, _, width, _ in boxes), max(y + height for _, y, _, height in boxes)
    return left, top, right + 0.05 - left, bottom + 0.05 - top


def _draw_box(axes: "Axes", box: Box, **look: Any) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle(box[:2], *box[2:], **look))


def _label(axes: "Axes", x: float, y: float, text: str, *, vertical: bool = False) -> None:
    axes.text(x, y, text, ha="center", va="center", fontsize=10, rotation=90 if vertical else 0)

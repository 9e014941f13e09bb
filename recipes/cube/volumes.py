"""The table and the picture of what a rank receives for a Transformer layer, on every mesh and in other schemes.

Forward and backward, in units of M h: the elements of an activation of M tokens and h features.
"""

from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hanayo.divisibility import MeshSizes
from recipes.cube.meshes import TransformerLayer, best_mesh, ranked_meshes
from recipes.cube.schemes import OneD, TwoAndAHalfD, two_d
from recipes.paper import figure
from recipes.paper.page import markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RANKS, TOKENS, HIDDEN = (8, 64), (16384, 131072), (4096, 8192)
HEAD_SIZE = 128
PARTS = (
    ("activations along y", figure.BLUE),
    ("weights along x", figure.ORANGE),
    ("activations along z", figure.GREEN),
)


def layer_of(tokens: int, hidden: int) -> TransformerLayer:
    """Returns a layer with heads of the usual size, and a feed-forward network of 4 h."""
    return TransformerLayer(tokens, hidden, hidden // HEAD_SIZE)


def cube_of(num_ranks: int) -> MeshSizes:
    """Returns the mesh p x p x p."""
    side = round(num_ranks ** (1 / 3))
    return side, side, side


def parts(layer: TransformerLayer, mesh: MeshSizes) -> tuple[float, float, float]:
    """Returns what is received along y, x and z, in M h. In row-parallel layers y and z trade roles."""
    received = {"x": 0.0, "y": 0.0, "z": 0.0}
    for linear in layer.linears:
        volume = linear.volume(mesh)
        of_input, of_output = ("z", "y") if linear.row_parallel else ("y", "z")
        received[of_input] += volume.gather_x + volume.scatter_dx
        received[of_output] += volume.scatter_y + volume.gather_dy
        received["x"] += volume.gather_w + volume.scatter_dw
    unit = layer.tokens * layer.hidden
    return received["y"] / unit, received["x"] / unit, received["z"] / unit


def best_two_and_a_half(num_ranks: int, layer: TransformerLayer) -> TwoAndAHalfD:
    """Returns the depth of squares that communicates the least."""
    sides = [side for side in range(2, isqrt(num_ranks) + 1) if num_ranks % side**2 == 0]
    return min((TwoAndAHalfD(side, num_ranks // side**2) for side in sides), key=lambda one: one.volume(layer))


def table() -> str:
    """The block `volumes`."""
    head = ("h", "P", "tokens", "best mesh", "volume", "cube", "1-D", "2-D", "2.5-D: q, d", "volume")
    return markdown(head, [_row(h, p, m) for h in HIDDEN for p in RANKS for m in TOKENS])


def _row(hidden: int, num_ranks: int, tokens: int) -> list[str]:
    layer, unit = layer_of(tokens, hidden), tokens * hidden
    best, squares = best_mesh(num_ranks, layer), best_two_and_a_half(num_ranks, layer)
    side = isqrt(num_ranks)
    flat = f"{two_d(side).volume(layer) / unit:.2f}" if side**2 == num_ranks else "-"
    return [
        str(hidden),
        str(num_ranks),
        f"{tokens // 1024}k",
        str(best),
        f"**{layer.volume(best).total / unit:.2f}**",
        f"{layer.volume(cube_of(num_ranks)).total / unit:.2f}",
        f"{OneD(num_ranks).volume(layer) / unit:.2f}",
        flat,
        f"{squares.side}, {squares.depth}",
        f"{squares.volume(layer) / unit:.2f}",
    ]


def draw(path: Path, ranks: Sequence[int] = RANKS, tokens: Sequence[int] = TOKENS, hidden: int = HIDDEN[0]) -> None:
    """Draw a bar for each mesh that fits, the best first, in a panel for each number of ranks and of tokens."""
    plot = figure.new(10.0, 3.1 * len(ranks))
    panels = plot.subplots(len(ranks), len(tokens), squeeze=False)
    for row, num_ranks in zip(panels, ranks, strict=True):
        for axes, m in zip(row, tokens, strict=True):
            _draw_panel(axes, num_ranks, layer_of(m, hidden))
    panels[0][0].legend(fontsize=8, frameon=False, loc="upper left")
    figure.save(plot, path)


def _draw_panel(axes: "Axes", num_ranks: int, layer: TransformerLayer) -> None:
    shown = ranked_meshes(num_ranks, layer)
    below = [0.0] * len(shown)
    for number, (name, shade) in enumerate(PARTS):
        heights = [parts(layer, mesh)[number] for mesh in shown]
        axes.bar(range(len(shown)), heights, 0.7, bottom=below, color=shade, label=name)
        below = [a + b for a, b in zip(below, heights, strict=True)]
    labels = axes.set_xticks(range(len(shown)), ["\n".join(map(str, mesh)) for mesh in shown])
    figure.plain(
        axes, f"P = {num_ranks}, {layer.tokens // 1024}k tokens, h = {layer.hidden}", y="received per rank [M h]"
    )
    axes.tick_params(axis="x", length=0, labelsize=7)
    if cube_of(num_ranks) in shown:
        labels[shown.index(cube_of(num_ranks))].label1.set(weight="bold", color=figure.RED)
    unit, side = layer.tokens * layer.hidden, isqrt(num_ranks)
    one_d, squares = OneD(num_ranks).volume(layer) / unit, best_two_and_a_half(num_ranks, layer)
    _draw_line(axes, one_d, "1-D", "center")
    if side**2 == num_ranks:
        _draw_line(axes, two_d(side).volume(layer) / unit, "2-D", "bottom")
    _draw_line(axes, squares.volume(layer) / unit, f"2.5-D\n{squares.side}, {squares.depth}", "top")
    axes.set_ylim(0, 1.4 * one_d)
    for place, height in enumerate(below):
        if height > 1.4 * one_d:
            axes.text(place, 1.4 * one_d, f"{height:.1f}", ha="center", va="bottom", fontsize=7.5)


def _draw_line(axes: "Axes", height: float, name: str, place: str) -> None:
    axes.axhline(height, color=figure.INK, linewidth=0.9, linestyle="--")
    axes.annotate(name, (1.01, height), xycoords=("axes fraction", "data"), va=place, fontsize=7.5)

"""Compares the 3-D paper's two ratios on 64 ranks, 2.32 over 1-D and 1.57 over 2-D, with modelled steps.

The model has two free numbers, which the paper's tables would tell: the share of its step that 1-D communicates, and
how many tokens M there are per hidden size h. Each ratio is shown as modelled and as if nothing overlapped.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.benchmarks.schemes.log import Replay
from recipes.benchmarks.schemes.names import ONE_D, TWO_D, three_d
from recipes.paper import figure
from recipes.paper.cube_steps import SHARE, Sizes, machine, meshes, step
from recipes.paper.page import markdown, percent
from recipes.paper.printed import CUBE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_RANKS, HIDDEN, LENGTH = 64, 1024, 128
SHARES = (0.5, 0.6, 0.7, 0.8, 0.9)
SHAPES = (1, 2, 4, 8, 16)
"""M / h"""
SHAPE = 8
"""of the scaling tables' step on 64 ranks"""
PEERS = {"1-D": ONE_D[0], "2-D": TWO_D}

Time = Callable[[Replay], float]


def overlapped(one: Replay) -> float:
    """The modelled step."""
    return one.step


def apart(one: Replay) -> float:
    """The step if nothing overlapped."""
    return one.apart


TIMES: dict[str, Time] = {"modelled": overlapped, "if nothing overlapped": apart}


def sizes_of(shape: int) -> Sizes:
    """A step with M = `shape` h."""
    return Sizes(shape * HIDDEN, HIDDEN, shape * HIDDEN // LENGTH)


def replay_of(name: str, share: float, shape: int = SHAPE) -> Replay:
    """Replay a scheme where 1-D communicates this share."""
    sizes = sizes_of(shape)
    return step(sizes, NUM_RANKS, name, machine(share, sizes))


def cube_over(peer: str, share: float, time: Time = overlapped, shape: int = SHAPE) -> float:
    """The cube's speed relative to 1-D or 2-D."""
    slow, cube = (replay_of(name, share, shape) for name in (PEERS[peer], three_d((4, 4, 4))))
    return time(slow) / time(cube)


def best_mesh(share: float, time: Time = overlapped) -> tuple[tuple[int, int, int], float]:
    """The mesh with the shortest step, and this step."""
    sizes = sizes_of(SHAPE)
    times = {mesh: time(one) for mesh, one in meshes(sizes, NUM_RANKS, machine(share, sizes)).items()}
    return min(times.items(), key=lambda one: (float(f"{one[1]:.9g}"), one[0]))


def best_over(peer: str, share: float, time: Time = overlapped) -> float:
    """The best mesh's speed relative to 1-D or 2-D."""
    return time(replay_of(PEERS[peer], share)) / best_mesh(share, time)[1]


def share_for(peer: str, time: Time = overlapped, shape: int = SHAPE) -> float:
    """The share with which the cube has the paper's ratio, by bisection."""
    low, high = 0.5, 0.99
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if cube_over(peer, middle, time, shape) < CUBE[peer] else (low, middle)
    return (low + high) / 2


def slower_messages(share: float = SHARE) -> float:
    """How much longer than here 2-D's messages would take for the paper's ratio over 2-D, if nothing overlapped."""
    square, cube = replay_of(TWO_D, share), replay_of(three_d((4, 4, 4)), share)
    return (CUBE["2-D"] * cube.apart - square.computing) / square.receiving


def table() -> str:
    """The block `cube-share`: M = 8h; in brackets: if nothing overlapped."""
    rows = []
    for share in SHARES:
        cube, best = ([_both(of, peer, share) for peer in PEERS] for of in (cube_over, best_over))
        names = ",".join(map(str, best_mesh(share)[0])), ",".join(map(str, best_mesh(share, apart)[0]))
        mesh = names[0] if names[0] == names[1] else f"{names[0]} ({names[1]})"
        rows.append((percent(share, 0), *cube, mesh, *best))
    head = ("1-D communicates", "cube over 1-D", "cube over 2-D", "best mesh", "best over 1-D", "best over 2-D")
    return markdown(head, rows)


def _both(of: Callable[[str, float, Time], float], peer: str, share: float) -> str:
    return f"{of(peer, share, overlapped):.2f} ({of(peer, share, apart):.2f})"


def shapes_table() -> str:
    """The block `cube-shapes`: for each M / h, the share that gives the paper's ratio over 1-D, and the other ratio."""
    rows = []
    for shape in SHAPES:
        shares = {time: share_for("1-D", time, shape) for time in TIMES.values()}
        cells = ((percent(share), f"{cube_over('2-D', share, time, shape):.2f}") for time, share in shares.items())
        rows.append((f"{shape} h", *(cell for pair in cells for cell in pair)))
    head = (column for how in TIMES for column in (f"{how}: 1-D communicates", "cube over 2-D"))
    return markdown(("M", *head), rows)


def draw(path: Path) -> None:
    """Draw the ratios over the share, a panel for each peer."""
    plot = figure.new(9.5, 3.6)
    for axes, peer in zip(plot.subplots(1, len(PEERS)), PEERS, strict=True):
        _draw_panel(axes, peer)
    handles, labels = axes.get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.save(plot, path)


def _draw_panel(axes: "Axes", peer: str) -> None:
    shares = [0.3 + 0.02 * place for place in range(33)]
    percents = [100 * share for share in shares]
    for (how, time), style in zip(TIMES.items(), ("-", "--"), strict=True):
        for of, colour, name in ((cube_over, figure.RED, "cube"), (best_over, figure.BLUE, "best mesh")):
            ratios = [of(peer, share, time) for share in shares]
            axes.plot(percents, ratios, style, color=colour, label=f"{name}, {how}")
    axes.axhline(CUBE[peer], color=figure.INK, linewidth=0.9, linestyle=":", label="the paper's cube [P]")
    axes.axvline(100 * SHARE, color=figure.SOFT, linewidth=0.8, linestyle=":")
    figure.plain(axes, f"64 ranks, M = {SHAPE}h: speed over {peer}", "share of its step that 1-D communicates [%]")

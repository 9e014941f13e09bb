"""Shows weak and strong scaling of 1-D, 2-D and 3-D from 1 to 64 ranks, as `cube_steps` models it."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.benchmarks.schemes.log import Replay
from recipes.benchmarks.schemes.names import ONE_D, TWO_D
from recipes.paper import figure
from recipes.paper.cube_steps import RANKS, Sizes, Steps, longer_batch, machine, steps, strong, wider_model
from recipes.paper.page import markdown, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RULES: Mapping[str, Callable[[int], Sizes]] = {
    "strong": strong,
    "weak, longer batch": longer_batch,
    "weak, wider model": wider_model,
}
MEASURED = Path(__file__).parents[2] / "docs" / "benchmarks" / "tensor3d.json"


def table(rule: str) -> str:
    """The block of a rule: each step, with the speed-up (strong) or the efficiency (weak), and ratios of steps."""
    rows = []
    for num_ranks in RANKS:
        sizes = RULES[rule](num_ranks)
        one = steps(sizes, num_ranks, machine())
        cells = [_cell(rule, num_ranks, replay) for replay in (one.one_d, one.two_d, one.cube, one.best)]
        cells.insert(3, ",".join(map(str, one.mesh)))
        rows.append((str(num_ranks), f"{sizes.tokens}, {sizes.hidden}", *cells, *ratios(one)))
    over = ("cube over 1-D", "cube over 2-D", "best over 1-D", "best over 2-D")
    return markdown(("ranks", "M, h", "1-D", "2-D", "cube", "best mesh", "its step", *over), rows)


def _cell(rule: str, num_ranks: int, replay: Replay | None) -> str:
    if replay is None:
        return ""
    scaled = f"{num_ranks * efficiency(replay):.1f}" if rule == "strong" else percent(efficiency(replay), 0)
    return f"{replay.step:.3f} ({scaled})"


def efficiency(replay: Replay) -> float:
    """How much of the step the ranks compute. All schemes compute the same, so strong scaling gains it times P."""
    return replay.computing / replay.step


def ratios(one: Steps) -> tuple[str, ...]:
    """The steps of 1-D and 2-D over the cube's and the best mesh's."""
    return tuple(
        "" if slow is None or quick is None else f"{slow.step / quick.step:.2f}"
        for quick in (one.cube, one.best)
        for slow in (one.one_d, one.two_d)
    )


def measured() -> list[tuple[str, int, str, float]]:
    """What emulated hosts confirm: case, hosts, scheme, measured / modelled step."""
    cases = json.loads(MEASURED.read_text(encoding="utf-8"))["cases"]
    return [
        (case["case"]["title"], case["case"]["hosts"], one["name"], one["step"]["median"] / one["predicted"]["step"])
        for case in cases
        for one in case["results"]
    ]


def measured_table() -> str:
    """The block `cube-measured`: by hosts, 1-D and the mesh with the least volume; then 2-D and the cube."""
    found = measured()
    rows = []
    for title in ("strong", "weak"):
        for place, label in ((0, "1-D"), (1, "3-D, the mesh with the least volume")):
            by_hosts = {hosts: [one[3] for one in found if one[:2] == (title, hosts)][place] for hosts in (1, 2, 4, 8)}
            rows.append((f"{title}, {label}", *(f"{ratio:.3f}" for ratio in by_hosts.values())))
    rows.append(("two layers, 1-D", "", "", *(f"{_of(found, hosts, ONE_D[0]):.3f}" for hosts in (4, 8))))
    rows.append(("two layers, 2-D", "", "", f"{_of(found, 4, TWO_D):.3f}", ""))
    rows.append(("two layers, cube 2,2,2", "", "", "", f"{_of(found, 8, '3-d 2,2,2'):.3f}"))
    return markdown(("measured / modelled", "1 host", "2", "4", "8"), rows)


def _of(found: list[tuple[str, int, str, float]], hosts: int, name: str) -> float:
    """The first of this scheme, other than in the scaling cases."""
    return next(ratio for title, *case, ratio in found if case == [hosts, name] and title in ("shapes", "two-d"))


def draw(path: Path) -> None:
    """Draw the speed-up of the strong rule, and the efficiencies of the weak ones."""
    plot = figure.new(9.5, 3.4)
    for axes, rule in zip(plot.subplots(1, len(RULES)), RULES, strict=True):
        _draw_rule(axes, rule)
    handles, labels = axes.get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.save(plot, path)


def _draw_rule(axes: "Axes", rule: str) -> None:
    modelled = {num_ranks: steps(RULES[rule](num_ranks), num_ranks, machine()) for num_ranks in RANKS}
    for label, style in _STYLES.items():
        points = [(p, _height(rule, p, replay)) for p, one in modelled.items() if (replay := _LINES[label](one))]
        axes.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
    if rule == "strong":
        axes.plot(RANKS, RANKS, color=figure.SOFT, linestyle=":", linewidth=0.9)
        axes.set_yscale("log", base=2)
        axes.set_yticks(RANKS, [str(count) for count in RANKS])
    else:
        axes.set_ylim(0, 105)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RANKS, [str(count) for count in RANKS])
    figure.plain(axes, rule, "ranks", "speed-up" if rule == "strong" else "efficiency [%]")


def _height(rule: str, num_ranks: int, replay: Replay) -> float:
    return efficiency(replay) * (num_ranks if rule == "strong" else 100)


_LINES: Mapping[str, Callable[[Steps], Replay | None]] = {
    "1-D": lambda one: one.one_d,
    "2-D": lambda one: one.two_d,
    "cube": lambda one: one.cube,
    "best mesh": lambda one: one.best,
}
_STYLES: Mapping[str, dict[str, Any]] = {
    "1-D": {"color": figure.GREY, "marker": "o"},
    "2-D": {"color": figure.ORANGE, "marker": "s"},
    "cube": {"color": figure.RED, "marker": "D"},
    "best mesh": {"color": figure.BLUE, "marker": "o"},
}

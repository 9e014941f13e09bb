"""Explains the paper's 8-GPU throughputs by modelled makespans with one fitted T_C per cluster, and its scaling.

Only ratios within a row are used, because the paper counts batches differently in different layouts. For each row

    residual[scheme] = log(measured throughput * modelled makespan), less its mean over the row's schemes

is how far a scheme is above or below the model. T_C minimises the sum of their squares over both rows of a cluster.

Weak and strong scaling are over D = 1, 2, 4 pipelines, P = 8, W = 2, with gradients summed over them. Weak scaling
keeps the batch of each pipeline, strong scaling keeps the total batch:

    D            1    2    4
    weak   B     8    8    8     micro-batches per pipeline
    strong B    32   16    8

Assumed is a ring all-reduce: a rank's share takes 2 (D-1)/D R, where R is the time in which its gradients cross the
link once. It overlaps with compute, stage by stage, each after its last backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, sqrt
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hanayo.schedule import CostModel, Schedule, build, simulate
from recipes.paper import figure
from recipes.paper.closed_form import Times, dapple, gpipe, hanayo
from recipes.paper.page import markdown, percent
from recipes.paper.printed import EIGHT_GPUS, SCHEMES, STRONG, WEAK, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WAVES = SCHEMES[3:]
"""The columns that differ only in W."""

Reading = Callable[[Row, Times], float]
"""The makespan of the column Chimera-wave under one interpretation of what ran."""


def half_the_ranks(row: Row, times: Times) -> float:
    """One wave over P/2 ranks, twice as many pipelines."""
    return hanayo(row.num_ranks // 2, 1, times.on(row.num_ranks // 2))


def never_below_four(row: Row, times: Times) -> float:
    """One wave over 4 ranks at P = 8, and also in the layout P = 4, D = 2."""
    return hanayo(4, 1, times.on(4))


@dataclass(frozen=True)
class Fit:
    """The fit of one cluster: its rows, the fitted columns, and T_C in T_F of eight ranks."""

    cluster: str
    columns: tuple[str, ...]
    message: float
    backward: float
    reading: Reading

    @property
    def rows(self) -> tuple[Row, ...]:
        """Both layouts."""
        return tuple(row for row in EIGHT_GPUS if row.cluster == self.cluster)

    def makespan(self, row: Row, scheme: str) -> float:
        """In T_F of eight ranks."""
        times = Times(1.0, self.backward, self.message)
        if scheme == "Chimera-wave":
            return self.reading(row, times)
        p, own = row.num_ranks, times.on(row.num_ranks)
        if scheme.startswith("Hanayo"):
            return hanayo(p, int(scheme[-1]), own)
        return gpipe(p, own) if scheme == "GPipe" else dapple(p, own)

    def residuals(self, row: Row) -> dict[str, float]:
        """log(measured / modelled) for every scheme, fitted or not, minus its mean over the fitted columns."""
        raw = {
            scheme: log(measured * self.makespan(row, scheme))
            for scheme, measured in zip(SCHEMES, row.throughput, strict=True)
        }
        mean = sum(raw[column] for column in self.columns) / len(self.columns)
        return {scheme: value - mean for scheme, value in raw.items()}

    @property
    def squares(self) -> list[float]:
        """The squared residuals of the fitted columns in both layouts."""
        both = map(self.residuals, self.rows)
        return [residuals[column] ** 2 for residuals in both for column in self.columns]


def fit(cluster: str, columns: tuple[str, ...], backward: float = 2.0, reading: Reading = half_the_ranks) -> Fit:
    """Fit T_C by least squares."""

    def at(message: float) -> Fit:
        return Fit(cluster, columns, message, backward, reading)

    return at(lowest(lambda message: sum(at(message).squares), 0.0, 0.3))


def fit_all(columns: tuple[str, ...], backward: float = 2.0, reading: Reading = half_the_ranks) -> list[Fit]:
    """Fit all four clusters."""
    return [fit(cluster, columns, backward, reading) for cluster in dict.fromkeys(row.cluster for row in EIGHT_GPUS)]


def lowest(of: Callable[[float], float], low: float, high: float, within: float = 1e-5) -> float:
    """The minimum of a unimodal function, by ternary search."""
    while high - low > within:
        third = (high - low) / 3
        low, high = (low, high - third) if of(low + third) < of(high - third) else (low + third, high)
    return (low + high) / 2


def rms(fits: Sequence[Fit]) -> float:
    """The root mean square residual over all fitted columns."""
    squares = [square for fit in fits for square in fit.squares]
    return sqrt(sum(squares) / len(squares))


def fits_table() -> str:
    """The block `fits`: several ways to fit the four clusters."""
    shown = ways()
    rows = []
    for name, fits in shown:
        cells = [f"T_C {one.message:.4f}, rms {percent(rms([one]), 2)}" for one in fits]
        rows.append((name, *cells, f"**{percent(rms(fits), 2)}**"))
    return markdown(("fitted columns", *(one.cluster for one in shown[0][1]), "all clusters"), rows)


def ways() -> list[tuple[str, list[Fit]]]:
    """The fits that the page shows, with their names."""
    bend = lowest(lambda backward: rms(fit_all(SCHEMES, backward, never_below_four)), 1.0, 3.0, 0.005)
    return [
        ("Hanayo W = 2, 4, 8", fit_all(WAVES)),
        (f"Hanayo W = 2, 4, 8, T_B = {bend:.2f} T_F", fit_all(WAVES, bend)),
        ("all six", fit_all(SCHEMES)),
        ("all six, Chimera-wave never below 4 ranks", fit_all(SCHEMES, reading=never_below_four)),
        (f"the same, one T_B fitted for all: {bend:.2f} T_F", fit_all(SCHEMES, bend, never_below_four)),
    ]


def ratios_table() -> str:
    """The block `ratios`: throughput relative to W = 2, measured and modelled, with T_C fitted to the waves alone."""
    rows = []
    for one in fit_all(WAVES):
        for row in one.rows:
            residuals = one.residuals(row)
            base = row.throughput[SCHEMES.index("Hanayo W=2")], residuals["Hanayo W=2"]
            cells = []
            for scheme, measured in zip(SCHEMES, row.throughput, strict=True):
                error = exp(residuals[scheme] - base[1])
                ratio = measured / base[0]
                cells.append(f"{ratio:.3f} / {ratio / error:.3f} ({100 * (error - 1):+.1f})")
            rows.append((f"{one.cluster}, P={row.num_ranks} D={8 // row.num_ranks}", *cells))
    return markdown(("cluster, layout", *SCHEMES), rows)


def draw(path: Path) -> None:
    """Draw each row relative to W = 2: bars are measured, marks modelled."""
    plot = figure.new(9.5, 4.8)
    panels = plot.subplots(2, 4, sharey=True)
    for column, one in zip(panels.T, fit_all(WAVES), strict=True):
        for axes, row in zip(column, one.rows, strict=True):
            _draw_row(axes, one, row)
        column[0].set_title(f"{one.cluster}, T_C = {one.message:.3f}\nP=8 D=1", loc="left", fontsize=8)
        column[1].set_title("P=4 D=2", loc="left", fontsize=8)
    for axes in panels[:, 0]:
        axes.set_ylabel("throughput / that of W=2", fontsize=8)
    handles, labels = panels[1, 0].get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    figure.save(plot, path)


def _draw_row(axes: "Axes", one: Fit, row: Row) -> None:
    colours = [figure.BLUE if scheme in WAVES else figure.GREY for scheme in SCHEMES]
    base, modelled = row.throughput[SCHEMES.index("Hanayo W=2")], one.makespan(row, "Hanayo W=2")
    places = range(len(SCHEMES))
    axes.bar(places, [value / base for value in row.throughput], 0.7, color=colours, label="measured [R]")
    ratios = [modelled / one.makespan(row, scheme) for scheme in SCHEMES]
    axes.plot(places, ratios, "D", color=figure.INK, markersize=3.5, label="modelled")
    if row.num_ranks == 4:
        other = modelled / replace(one, reading=never_below_four).makespan(row, "Chimera-wave")
        label = "modelled, Chimera-wave over four ranks"
        axes.plot([2], [other], "D", color=figure.INK, markersize=3.5, markerfacecolor="white", label=label)
    figure.plain(axes)
    axes.set_xticks(places, ["GPipe", "DAPPLE", "Chimera-\nwave", "W=2", "W=4", "W=8"], rotation=60)
    axes.tick_params(labelsize=7)
    axes.set_ylim(0, 1.2)


CLUSTER = "A100, PCIe, two per node"
"""the cluster whose throughput at P = 8, W = 2 equals that of weak scaling at D = 1"""

LINKS = (0.0, 0.5, 1.0, 2.0)
"""R in T_F"""


@cache
def fitted_message() -> float:
    """T_C of that cluster, fitted to its 8-GPU rows."""
    return fit(CLUSTER, WAVES).message


def weak(degree: int, message: float, link: float) -> float:
    """Throughput of D pipelines with 8 micro-batches each, relative to D times that of one."""
    return makespan(8, 1, message, link) / makespan(8, degree, message, link)


def strong(degree: int, message: float, link: float) -> float:
    """Speed of D pipelines that share 32 micro-batches, relative to one."""
    return makespan(32, 1, message, link) / makespan(32 // degree, degree, message, link)


def makespan(num_microbatches: int, degree: int, message: float, link: float) -> float:
    """The step of one pipeline, gradient reduction included, in T_F."""
    costs = CostModel(message=message, gradient_reduce=2 * (degree - 1) / degree * link)
    return simulate(_wave(num_microbatches), costs).makespan


@cache
def _wave(num_microbatches: int) -> Schedule:
    return build("hanayo", num_ranks=8, num_microbatches=num_microbatches, num_waves=2)


def scaling_table() -> str:
    """The block `scaling`."""
    printed = [WEAK[d] / d / WEAK[1] for d in (2, 4)] + [STRONG[d] / 100 for d in (2, 4)]
    rows = [("printed [P]", *map(percent, printed)), ("groups of P one after another, R = 0", *_apart())]
    for message, link in [(0.0, 0.0), *((fitted_message(), link) for link in LINKS)]:
        cells = [of(degree, message, link) for of in (weak, strong) for degree in (2, 4)]
        rows.append((f"simulated, T_C = {message:.3f}, R = {link:g} T_F", *map(percent, cells)))
    return markdown(("", "weak, D = 2", "weak, D = 4", "strong, D = 2", "strong, D = 4"), rows)


def _apart() -> tuple[str, ...]:
    """Groups of P micro-batches run one after another, so D pipelines are D times as fast."""
    return tuple(map(percent, (1.0, 1.0, 2.0, 4.0)))

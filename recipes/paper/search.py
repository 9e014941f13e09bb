"""Searches the layouts P x D of 32 devices and the waves W, with the message times fitted to 8 GPUs.

All layouts share 32 micro-batches, so each pipeline has B = 32 / D = P of them:

    P x D    8 x 4    4 pipelines, each 8 micro-batches over 8 ranks; T_F = 1
             4 x 8    8 pipelines, each 4 micro-batches over 4 ranks; T_F = 2, and messages take as long as before

The cost of the gradient reduction isn't known and is left out; it grows with D.
"""

from pathlib import Path

from recipes.paper import figure
from recipes.paper.closed_form import Times, dapple, gpipe, hanayo
from recipes.paper.clusters import WAVES, Fit, fit_all
from recipes.paper.page import markdown, percent
from recipes.paper.printed import SCHEMES, Row

NUM_DEVICES = 32
LAYOUTS = (4, 8, 16, 32)
"""P"""
CANDIDATES = (1, 2, 4, 8)
"""W"""
MAX_STAGES = 128
"""as many as the paper's pipeline with the most stages has: P = 8, W = 8"""


def makespan(num_ranks: int, num_waves: int, message: float) -> float:
    """The step of every pipeline, B = P, in T_F of eight ranks."""
    return hanayo(num_ranks, num_waves, Times(message=message).on(num_ranks))


def waves_for(num_ranks: int) -> tuple[int, ...]:
    """The waves whose stages are not too many."""
    return tuple(waves for waves in CANDIDATES if 2 * waves * num_ranks <= MAX_STAGES)


def best(num_ranks: int, message: float) -> int:
    """The waves with the shortest step."""
    return min(waves_for(num_ranks), key=lambda waves: makespan(num_ranks, waves, message))


def peers(num_ranks: int, message: float) -> tuple[float, ...]:
    """The steps of GPipe, DAPPLE and Chimera-wave, which is one wave over half the ranks."""
    times = Times(message=message).on(num_ranks)
    return gpipe(num_ranks, times), dapple(num_ranks, times), makespan(num_ranks // 2, 1, message)


def table() -> str:
    """The block `search`: throughput relative to P = 8, D = 4, W = 2; the best W of each layout is bold."""
    rows = []
    for one in fit_all(WAVES):
        base = makespan(8, 2, one.message)
        for num_ranks in LAYOUTS:
            others = [f"{base / step:.3f}" for step in peers(num_ranks, one.message)]
            cells = [_cell(num_ranks, waves, one.message, base) for waves in CANDIDATES]
            name = f"{one.cluster}, T_C = {one.message:.3f}" if num_ranks == LAYOUTS[0] else ""
            rows.append((name, f"{num_ranks} x {NUM_DEVICES // num_ranks}", *others, *cells))
    head = ("cluster", "P x D", *SCHEMES[:3], *(f"W={waves}" for waves in CANDIDATES))
    return markdown(head, rows)


def _cell(num_ranks: int, num_waves: int, message: float, base: float) -> str:
    if num_waves not in waves_for(num_ranks):
        return "-"
    ratio = f"{base / makespan(num_ranks, num_waves, message):.3f}"
    return f"**{ratio}**" if num_waves == best(num_ranks, message) else ratio


def choice(one: Fit, row: Row) -> tuple[str, str, float]:
    """The best waves of 8 GPUs as measured and as modelled, and how much slower the second was measured to be."""
    measured = dict(zip(SCHEMES, row.throughput, strict=True))
    fastest = max(WAVES, key=measured.__getitem__)
    chosen = min(WAVES, key=lambda scheme: one.makespan(row, scheme))
    return fastest, chosen, 1 - measured[chosen] / measured[fastest]


def choices_table() -> str:
    """The block `choices`."""
    rows = []
    for one in fit_all(WAVES):
        for row in one.rows:
            fastest, chosen, loss = choice(one, row)
            names = (scheme.removeprefix("Hanayo ") for scheme in (fastest, chosen))
            rows.append((f"{one.cluster}, P={row.num_ranks} D={8 // row.num_ranks}", *names, percent(loss)))
    return markdown(("cluster, layout", "fastest [R]", "chosen by the model", "measured loss"), rows)


def draw(path: Path) -> None:
    """Draw throughput over waves, a line for each layout and a panel for each cluster."""
    fits = fit_all(WAVES)
    plot = figure.new(9.5, 3.2)
    panels = plot.subplots(1, len(fits), sharey=True)
    for axes, one in zip(panels, fits, strict=True):
        base = makespan(8, 2, one.message)
        for num_ranks, colour in zip(LAYOUTS, (figure.BLUE, figure.GREEN, figure.ORANGE, figure.RED), strict=True):
            waves = waves_for(num_ranks)
            ratios = [base / makespan(num_ranks, count, one.message) for count in waves]
            label = f"P = {num_ranks}, D = {NUM_DEVICES // num_ranks}"
            axes.plot(waves, ratios, "o-", color=colour, markersize=4, label=label)
        figure.plain(axes, f"{one.cluster}\nT_C = {one.message:.3f}", "W", "throughput" if one is fits[0] else "")
        axes.title.set_fontsize(9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(CANDIDATES, [str(count) for count in CANDIDATES])
    handles, labels = panels[0].get_legend_handles_labels()
    plot.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.save(plot, path)

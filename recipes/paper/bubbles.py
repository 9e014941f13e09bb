"""Compares the bubble ratios of the paper's Fig 1 with its formulas and with simulated schedules."""

from dataclasses import dataclass
from pathlib import Path

from recipes.paper import figure
from recipes.paper.closed_form import Times, bubble, chimera_bubble, dapple, gems, gpipe, hanayo_printed_bubble
from recipes.paper.contender import Contender
from recipes.paper.page import markdown, percent
from recipes.paper.printed import BUBBLES


@dataclass(frozen=True)
class Bubble:
    """The bubble ratio of one scheme at one P: as printed, by formula, and simulated."""

    scheme: str
    num_ranks: int
    printed: float
    formula: float
    simulated: float


def bubbles() -> list[Bubble]:
    """All of Fig 1."""
    return [
        Bubble(scheme, num_ranks, printed / 100, formula(scheme, num_ranks), simulated(scheme, num_ranks))
        for num_ranks, schemes in BUBBLES.items()
        for scheme, printed in schemes.items()
    ]


def formula(scheme: str, num_ranks: int) -> float:
    """The paper's formula (for GEMS, ours) at T_C = 0, T_B = 2 T_F, B = P."""
    times = Times()
    match scheme.split(" W="):
        case ["GPipe"]:
            return bubble(num_ranks, gpipe(num_ranks, times), times)
        case ["DAPPLE"]:
            return bubble(num_ranks, dapple(num_ranks, times), times)
        case ["GEMS"]:
            return bubble(num_ranks, gems(num_ranks, times), times)
        case ["Chimera"]:
            return chimera_bubble(num_ranks, times)
        case [_, waves]:
            return hanayo_printed_bubble(num_ranks, int(waves))
    raise AssertionError(scheme)


def simulated(scheme: str, num_ranks: int) -> float:
    """The bubble ratio of the simulated schedule."""
    names = {"GPipe": "gpipe", "DAPPLE": "1f1b", "GEMS": "gems", "Chimera": "chimera", "Hanayo": "hanayo"}
    kind, _, waves = scheme.partition(" W=")
    return Contender(names[kind], int(waves or 1)).timeline(num_ranks, num_ranks).bubble_ratio


def table() -> str:
    """The block `bubbles`."""
    rows = [
        (
            one.scheme,
            str(one.num_ranks),
            percent(one.printed, 2),
            percent(one.formula, 2),
            percent(one.simulated, 2),
        )
        for one in bubbles()
    ]
    return markdown(("scheme", "P", "printed [P]", "formula", "simulated"), rows)


def draw(path: Path) -> None:
    """Draw Fig 1: two bars per scheme."""
    plot = figure.new(8.5, 3.4)
    panels = plot.subplots(1, len(BUBBLES), sharey=True)
    for axes, num_ranks in zip(panels, BUBBLES, strict=True):
        shown = [one for one in bubbles() if one.num_ranks == num_ranks]
        places = range(len(shown))
        left, right = [place - 0.2 for place in places], [place + 0.2 for place in places]
        printed = axes.bar(left, [100 * one.printed for one in shown], 0.4, color=figure.GREY)
        real = axes.bar(right, [100 * one.simulated for one in shown], 0.4, color=figure.BLUE)
        for bars in (printed, real):
            heights = [f"{bar.get_height() + 1e-9:.1f}" for bar in bars]  # 25.45 as 25.5
            axes.bar_label(bars, heights, fontsize=7, padding=1)
        axes.set_xticks(places, [one.scheme.replace(" ", "\n") for one in shown])
        figure.plain(axes, f"P = B = {num_ranks}", y="bubble [%]" if num_ranks == 8 else "")
        axes.set_ylim(0, 110)
    panels[-1].legend([printed, real], ["printed in the paper", "simulated"], fontsize=8, frameon=False)
    figure.save(plot, path)

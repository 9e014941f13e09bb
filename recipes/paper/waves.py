"""Compares the best simulated number of waves with the closed form W* = 1/2 sqrt(T_B/T_C)."""

from functools import cache
from math import sqrt
from pathlib import Path

from lightning_hanayo.schedule import CostModel, Schedule, build, simulate
from recipes.paper import figure
from recipes.paper.page import markdown

NUM_RANKS = 8

MESSAGES = (0.3, 0.2, 0.125, 0.088, 0.06, 0.04, 0.027, 0.017, 0.01, 0.006)
"""T_C in T_F; 0.088, 0.027 and 0.017 are those of the fitted clusters"""

CANDIDATES = range(1, 11)


def formula(message: float) -> float:
    """W* at T_B = 2 T_F: the derivative of P(T_F+T_B) + (P-1) T_B/W + [4W(P-1) + 2(P-2)] T_C is 0 there."""
    return 0.5 * sqrt(2 / message)


def makespans(message: float) -> dict[int, float]:
    """W -> simulated makespan in T_F, B = P, T_B = 2 T_F."""
    return {waves: simulate(_wave(waves), CostModel(message=message)).makespan for waves in CANDIDATES}


@cache
def _wave(num_waves: int) -> Schedule:
    return build("hanayo", num_ranks=NUM_RANKS, num_microbatches=NUM_RANKS, num_waves=num_waves)


def best(message: float) -> int:
    """The number of waves whose simulated makespan is least."""
    times = makespans(message)
    return min(times, key=times.__getitem__)


def table() -> str:
    """The block `waves`."""
    rows = []
    for message in MESSAGES:
        times = makespans(message)
        winner = min(times, key=times.__getitem__)
        cells = (f"{times[waves]:.2f}" for waves in (1, 2, 4, 8))
        rows.append((f"{message:g}", f"{formula(message):.2f}", str(winner), f"{times[winner]:.2f}", *cells))
    return markdown(("T_C / T_F", "W*", "best W simulated", "its makespan", "W = 1", "2", "4", "8"), rows)


def draw(path: Path) -> None:
    """Draw the best W over T_C, and the makespan over W for the T_C of the fitted clusters."""
    plot = figure.new(8.5, 3.3)
    left, right = plot.subplots(1, 2)
    fine = [0.006 * (0.3 / 0.006) ** (step / 40) for step in range(41)]
    left.plot(fine, [formula(message) for message in fine], color=figure.ORANGE, label="W* = 1/2 sqrt(T_B / T_C)")
    left.plot(fine, [best(message) for message in fine], "o", color=figure.BLUE, markersize=3.5, label="simulated best")
    left.set_xscale("log")
    figure.plain(left, f"best number of waves, P = B = {NUM_RANKS}", "T_C / T_F", "W")
    left.legend(fontsize=8, frameon=False)
    for message, colour in zip((0.088, 0.027, 0.017), (figure.RED, figure.ORANGE, figure.BLUE), strict=True):
        times = makespans(message)
        right.plot(list(times), list(times.values()), "o-", color=colour, markersize=3, label=f"T_C = {message:g} T_F")
        right.axvline(formula(message), color=colour, linewidth=0.8, linestyle=":")
    figure.plain(right, "makespan over waves; dotted: W*", "W", "makespan [T_F]")
    right.legend(fontsize=8, frameon=False)
    figure.save(plot, path)

"""Compares how unevenly activations are distributed over the ranks, relative to DAPPLE's variance.

The paper prints the variance of measured peak memory, weights and embeddings included, without a unit. Ours is the
variance of the activation peaks in M_a squared. Dividing both by DAPPLE's removes the units. `fitted` uses two of
the printed figures for the unit and for what doesn't come from activations, and predicts the other two.
"""

from statistics import pvariance

from recipes.paper.contender import Contender
from recipes.paper.page import markdown
from recipes.paper.printed import VARIANCE

NUM_RANKS = 8


def peaks(name: str, num_waves: int = 1) -> tuple[float, ...]:
    """Activations per rank in M_a, B = P."""
    return Contender(name, num_waves).timeline(NUM_RANKS, NUM_RANKS).peak_activations


def of(held: tuple[float, ...]) -> float:
    """The variance over all ranks, in M_a squared."""
    return pvariance(held)


def fitted(held: tuple[float, ...]) -> float:
    """The paper's variance by a line through its figures for GPipe, whose activations are even, and for DAPPLE."""
    slope = (VARIANCE["DAPPLE"] - VARIANCE["GPipe"]) / of(peaks("1f1b"))
    return VARIANCE["GPipe"] + slope * of(held)


def table() -> str:
    """The block `variance`."""
    ours = {
        "GPipe": [("GPipe", peaks("gpipe"))],
        "DAPPLE": [("DAPPLE", peaks("1f1b"))],
        "Chimera": [("Chimera", peaks("chimera"))],
        "Hanayo": [(f"Hanayo W={waves}", peaks("hanayo", waves)) for waves in (1, 2, 4, 8)],
    }
    base = of(peaks("1f1b"))
    rows = []
    for scheme, variants in ours.items():
        for name, held in variants:
            printed = VARIANCE[scheme]
            rows.append(
                (
                    name,
                    f"{printed:g}",
                    f"{printed / VARIANCE['DAPPLE']:.3f}",
                    f"{of(held) / base:.3f}",
                    f"{fitted(held):.2f}",
                    f"{min(held):g} to {max(held):g}",
                )
            )
    return markdown(
        ("scheme", "printed [P]", "of DAPPLE's", "simulated, of DAPPLE's", "fitted", "M_a per rank, P = 8"), rows
    )

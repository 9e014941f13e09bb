"""Shows what each rank holds at P = 8: copies of its share's weights (M_w), the most activations (M_a), their variance.

The paper's Fig 8 has measured bytes of them, of which only the variances are known to us: of the peak memory, weights
and embeddings included, without a unit. Ours is the variance of the activation peaks in M_a squared. Dividing both by
DAPPLE's removes the units. `fitted` uses two of the printed figures for the unit and for what doesn't come from
activations, and predicts the other two.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import pvariance

from recipes.paper import figure
from recipes.paper.contender import Contender
from recipes.paper.page import markdown
from recipes.paper.printed import VARIANCE

NUM_RANKS = 8


@dataclass(frozen=True)
class Scheme:
    """A scheme by the paper's name, and the schedule that is built for it."""

    label: str
    name: str
    num_waves: int = 1
    copies: int = 1
    """of the weights"""

    def activations(self, num_microbatches: int = NUM_RANKS) -> tuple[float, ...]:
        """The most that each rank holds in a step, in M_a."""
        return Contender(self.name, self.num_waves).timeline(NUM_RANKS, num_microbatches).peak_activations


SCHEMES = (
    Scheme("GPipe", "gpipe"),
    Scheme("DAPPLE", "1f1b"),
    Scheme("Chimera", "chimera", copies=2),
    *(Scheme(f"Hanayo W={waves}", "hanayo", waves) for waves in (1, 2, 4, 8)),
)


def table() -> str:
    """The block `ranks`."""
    rows = []
    for scheme in SCHEMES:
        held = scheme.activations()
        highest = (max(scheme.activations(load * NUM_RANKS)) for load in (2, 4))
        rows.append((scheme.label, f"{scheme.copies}", *(f"{one:.4g}" for one in (*held, *highest))))
    ranks = (f"rank {rank}" for rank in range(NUM_RANKS))
    return markdown(("scheme", "M_w", *ranks, "highest, B = 2P", "highest, B = 4P"), rows)


def draw(path: Path) -> None:
    """Draw the activations of each rank, a panel per scheme."""
    shown = [scheme for scheme in SCHEMES if scheme.num_waves in (1, 2, 4)]
    plot = figure.new(9.5, 2.6)
    for axes, scheme in zip(plot.subplots(1, len(shown), sharey=True), shown, strict=True):
        colour = figure.BLUE if scheme.name == "hanayo" else figure.GREY
        axes.bar(range(NUM_RANKS), scheme.activations(), 0.75, color=colour)
        weights = "M_w" if scheme.copies == 1 else f"{scheme.copies} M_w"
        figure.plain(axes, f"{scheme.label}\n{weights}", "rank", "most activations [M_a]" if scheme is shown[0] else "")
        axes.set_xticks((0, NUM_RANKS - 1))
    figure.save(plot, path)


def peaks(name: str, num_waves: int = 1) -> tuple[float, ...]:
    """Activations per rank in M_a, B = P."""
    return Contender(name, num_waves).timeline(NUM_RANKS, NUM_RANKS).peak_activations


def variance_of(held: tuple[float, ...]) -> float:
    """The variance over all ranks, in M_a squared."""
    return pvariance(held)


def fitted(held: tuple[float, ...]) -> float:
    """The paper's variance by a line through its figures for GPipe, whose activations are even, and for DAPPLE."""
    slope = (VARIANCE["DAPPLE"] - VARIANCE["GPipe"]) / variance_of(peaks("1f1b"))
    return VARIANCE["GPipe"] + slope * variance_of(held)


def variance_table() -> str:
    """The block `variance`."""
    ours = {
        "GPipe": [("GPipe", peaks("gpipe"))],
        "DAPPLE": [("DAPPLE", peaks("1f1b"))],
        "Chimera": [("Chimera", peaks("chimera"))],
        "Hanayo": [(f"Hanayo W={waves}", peaks("hanayo", waves)) for waves in (1, 2, 4, 8)],
    }
    base = variance_of(peaks("1f1b"))
    rows = []
    for scheme, variants in ours.items():
        for name, held in variants:
            printed = VARIANCE[scheme]
            rows.append(
                (
                    name,
                    f"{printed:g}",
                    f"{printed / VARIANCE['DAPPLE']:.3f}",
                    f"{variance_of(held) / base:.3f}",
                    f"{fitted(held):.2f}",
                    f"{min(held):g} to {max(held):g}",
                )
            )
    return markdown(
        ("scheme", "printed [P]", "of DAPPLE's", "simulated, of DAPPLE's", "fitted", "M_a per rank, P = 8"), rows
    )

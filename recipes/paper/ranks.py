"""Shows what each rank holds at P = 8: copies of its share's weights (M_w) and the most activations (M_a).

For these the paper's Fig 8 has measured bytes, of which only the variances are known to us (see `variance`).
"""

from dataclasses import dataclass
from pathlib import Path

from recipes.paper import figure
from recipes.paper.contender import Contender
from recipes.paper.page import markdown

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

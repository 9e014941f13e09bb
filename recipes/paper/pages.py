"""Lists the tables and pictures of the documents, and the functions that make them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from recipes.paper import (
    bubbles,
    catalogue,
    clusters,
    cube_scaling,
    cube_share,
    overview,
    peers,
    ranks,
    search,
    uneven,
    waves,
)
from recipes.paper.contender import OURS, PAIRED, SPLIT, WHOLE
from recipes.paper.page import fill

DOCS = Path(__file__).parents[2] / "docs"

Maker = Callable[[], str]

CUBE_RULES = {"strong": "strong", "batch": "weak, longer batch", "width": "weak, wider model"}
"""name of the block -> rule"""


@dataclass(frozen=True)
class Document:
    """A page and its blocks. The slow ones search for schedules, so the default tests leave them out."""

    path: Path
    quick: Mapping[str, Maker]
    slow: Mapping[str, Maker]

    def rebuild(self) -> None:
        """Replace every block."""
        made = {name: make() for name, make in {**self.quick, **self.slow}.items()}
        self.path.write_text(fill(self.path.read_text(encoding="utf-8"), made), encoding="utf-8")


DOCUMENTS = (
    Document(
        DOCS / "reproduction.md",
        quick={
            "bubbles": bubbles.table,
            "fits": clusters.fits_table,
            "ratios": clusters.ratios_table,
            "waves": waves.table,
            "choices": search.choices_table,
            "search": search.table,
            "scaling": clusters.scaling_table,
            "ranks": ranks.table,
            "variance": ranks.variance_table,
            **{f"equal-memory-{size}": partial(peers.equal_memory_table, size) for size in peers.SIZES},
            **{f"cube-{name}": partial(cube_scaling.table, rule) for name, rule in CUBE_RULES.items()},
            "cube-measured": cube_scaling.measured_table,
            "cube-share": cube_share.table,
            "cube-shapes": cube_share.shapes_table,
        },
        slow={
            **{f"uneven-{size}": partial(uneven.table, size) for size in uneven.SIZES},
            **{f"budgets-{size}": partial(peers.budgets_table, size) for size in peers.SIZES},
        },
    ),
    Document(
        DOCS / "concepts" / "schedules.md",
        quick={f"all-{size}": partial(peers.table, (*WHOLE, *SPLIT, *PAIRED, *OURS), size) for size in peers.SIZES},
        slow={},
    ),
)


def draw_all(folder: Path) -> None:
    """Draw all figures of both pages, and the README's."""
    for name, draw in (
        ("bubbles", bubbles.draw),
        ("clusters", clusters.draw),
        ("waves", waves.draw),
        ("search", search.draw),
        ("ranks", ranks.draw),
        ("uneven", uneven.draw),
        ("memory", peers.draw),
        ("cube-scaling", cube_scaling.draw),
        ("cube-share", cube_share.draw),
    ):
        draw(folder / f"paper-{name}.png")
    catalogue.draw(folder)
    overview.draw(folder / "overview.png")

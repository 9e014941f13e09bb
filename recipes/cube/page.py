"""The tables and pictures of `docs/concepts/cube.md`, and the functions that make them."""

from pathlib import Path

from recipes.cube import memory, volumes
from recipes.cube.picture import save_cube
from recipes.paper.page import fill

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURES = DOCS / "concepts" / "cube.md", DOCS / "figures"
BLOCKS = {"volumes": volumes.table, "memory": memory.table}


def rebuild(page: Path) -> None:
    """Replace every table of the page."""
    made = {name: make() for name, make in BLOCKS.items()}
    page.write_text(fill(page.read_text(encoding="utf-8"), made), encoding="utf-8")


def draw_all(folder: Path) -> tuple[Path, Path]:
    """Draw both pictures."""
    cube, bars = folder / "cube-layer.png", folder / "cube-volumes.png"
    save_cube(cube)
    volumes.draw(bars)
    return cube, bars

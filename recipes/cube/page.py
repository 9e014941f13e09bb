"""Page: which tables and pictures `docs/concepts/cube.md` holds, and who makes them."""

from pathlib import Path

from lightning_hanayo.plotting import save_cube
from recipes.cube import memory, volumes
from recipes.paper.page import fill

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURES = DOCS / "concepts" / "cube.md", DOCS / "figures"
BLOCKS = {"volumes": volumes.table, "memory": memory.table}


def rebuild(page: Path) -> None:
    """Replace every block."""
    made = {name: make() for name, make in BLOCKS.items()}
    page.write_text(fill(page.read_text(encoding="utf-8"), made), encoding="utf-8")


def draw_all(folder: Path) -> tuple[Path, Path]:
    """Both pictures."""
    cube, bars = folder / "cube-layer.png", folder / "cube-volumes.png"
    save_cube(cube)
    volumes.draw(bars)
    return cube, bars

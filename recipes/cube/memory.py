"""Memory: what a rank holds of a Transformer layer's linear layers between forward and backward."""

from lightning_hanayo.planner.volume import Grid
from recipes.cube.volumes import layer_of
from recipes.paper.table import markdown

TOKENS, HIDDEN = 16384, 4096
GRIDS: tuple[Grid, ...] = ((2, 2, 2), (4, 2, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8))


def table() -> str:
    """The block `memory`."""
    head = ("grid of 8", "weights", "saved, `gathered`", "saved, `shards`", "moves more, `shards`")
    return markdown(head, [_row(grid) for grid in GRIDS])


def _row(grid: Grid) -> list[str]:
    layer = layer_of(TOKENS, HIDDEN)
    kept, shards = layer.storage(grid), layer.storage(grid, "shards")
    more = layer.volume(grid, "shards").total / layer.volume(grid).total - 1
    saved = [storage.saved_inputs + storage.saved_weights for storage in (kept, shards)]
    return [str(grid), *(f"{size / 1e6:.0f}" for size in (kept.weights, *saved)), f"{100 * more:.0f} %"]

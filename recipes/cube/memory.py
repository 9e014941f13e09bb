"""The table of what a rank stores of a Transformer layer's linear layers between forward and backward."""

from lightning_hanayo.divisibility import MeshSizes
from recipes.cube.volumes import layer_of
from recipes.paper.page import markdown

TOKENS, HIDDEN = 16384, 4096
MESHES: tuple[MeshSizes, ...] = ((2, 2, 2), (4, 2, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8))


def table() -> str:
    """The block `memory`."""
    head = ("mesh of 8", "weights", "saved, `gathered`", "saved, `shards`", "more volume, `shards`")
    return markdown(head, [_row(mesh) for mesh in MESHES])


def _row(mesh: MeshSizes) -> list[str]:
    layer = layer_of(TOKENS, HIDDEN)
    kept, shards = layer.storage(mesh), layer.storage(mesh, "shards")
    more = layer.volume(mesh, "shards").total / layer.volume(mesh).total - 1
    saved = [storage.saved_inputs + storage.saved_weights for storage in (kept, shards)]
    return [str(mesh), *(f"{size / 1e6:.0f}" for size in (kept.weights, *saved)), f"{100 * more:.0f} %"]

"""Which mesh communicates the least, and how equal ones are ranked."""

from lightning_hanayo.divisibility import Divisibility
from recipes.cube.meshes import TransformerLayer, best_mesh, divisibility_of, ranked_meshes


def test_the_best_mesh_communicates_least_and_fits() -> None:
    layer = TransformerLayer(tokens=16384, hidden=4096, heads=32)
    ranked = ranked_meshes(8, layer)
    volumes = [layer.volume(mesh).total for mesh in ranked]
    assert volumes == sorted(volumes) and len(ranked) == 10 and ranked[0] == best_mesh(8, layer) == (4, 2, 1)
    narrow = TransformerLayer(tokens=64, hidden=4096, heads=2)
    assert best_mesh(8, TransformerLayer(tokens=64, hidden=4096, heads=8)) == (1, 4, 2)
    assert best_mesh(8, narrow) == (4, 2, 1), "two heads are all there is to share along y and z"
    assert divisibility_of(narrow, "blocks.0")[0] == Divisibility("blocks.0", "heads", 2, "yz")


def test_equal_volumes_are_ranked_by_storage() -> None:
    layer = TransformerLayer(tokens=3 * 64, hidden=64, heads=64)  # 12 Mh = 36 h^2 over z = over x, three times over
    ranked = ranked_meshes(4, layer)
    equal = [(a, b) for a, b in zip(ranked, ranked[1:], strict=False) if layer.volume(a).total == layer.volume(b).total]
    assert equal
    assert all(layer.storage(a).total <= layer.storage(b).total for a, b in equal)

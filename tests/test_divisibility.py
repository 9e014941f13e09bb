"""Which meshes there are, which fit, and what the error about one that doesn't fit says."""

from math import prod

import pytest

from lightning_hanayo.divisibility import Divisibility, MeshSizes, check_divisibility, meshes, meshes_that_fit
from lightning_hanayo.errors import HanayoError

HEADS = Divisibility("blocks.0.attention", "heads", 4, "yz")
HIDDEN = Divisibility("blocks.0", "features", 48, "z")


def test_all_meshes_of_a_number_of_ranks() -> None:
    assert meshes(1) == ((1, 1, 1),)
    assert len(set(meshes(8))) == 10 and len(set(meshes(12))) == 18
    assert all(prod(mesh) == 12 for mesh in meshes(12))


def test_meshes_that_fit() -> None:
    assert meshes_that_fit(8, [HEADS, HIDDEN]) == ((2, 1, 4), (2, 2, 2), (2, 4, 1), (4, 1, 2), (4, 2, 1), (8, 1, 1))
    assert meshes_that_fit(3, [HEADS]) == ((3, 1, 1),)
    assert meshes_that_fit(3, [Divisibility("norm", "samples", 4, "x"), HEADS]) == ()


@pytest.mark.parametrize(
    ("mesh", "required", "message"),
    [
        (
            (1, 4, 2),
            [HEADS, HIDDEN],
            "blocks.0.attention has 4 heads, which don't divide over y * z = 8 in the mesh (x, y, z) = (1, 4, 2). "
            "Meshes of 8 ranks that fit: (2, 2, 2), (2, 4, 1), (2, 1, 4).",
        ),
        (
            (1, 1, 5),
            [HEADS, HIDDEN],
            "blocks.0.attention has 4 heads, which don't divide over y * z = 5 in the mesh (x, y, z) = (1, 1, 5) "
            "(1 more like this). Meshes of 5 ranks that fit: (5, 1, 1).",
        ),
        (
            (1, 3, 1),
            [HEADS, Divisibility("blocks.0", "samples", 4, "x")],
            "blocks.0.attention has 4 heads, which don't divide over y * z = 3 in the mesh (x, y, z) = (1, 3, 1). "
            "No mesh of 3 ranks fits; try a cube of another size.",
        ),
    ],
)
def test_the_error_names_size_and_axes_and_the_nearest_meshes(
    mesh: MeshSizes, required: list[Divisibility], message: str
) -> None:
    with pytest.raises(HanayoError) as caught:
        check_divisibility(required, mesh)
    assert str(caught.value) == message


def test_one_axis_is_named_alone_and_what_fits_passes() -> None:
    check_divisibility([HEADS, HIDDEN], (3, 2, 2))
    with pytest.raises(HanayoError, match=r"blocks.0 has 48 features, which don't divide over z = 5 in the mesh"):
        check_divisibility([HIDDEN], (1, 1, 5))

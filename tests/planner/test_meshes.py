"""The grids: which fit, which is the best, and what is said of one that doesn't fit."""

from math import prod

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.meshes import (
    Requirement,
    best_grid,
    check_fit,
    grids,
    grids_that_fit,
    nearest_grids,
    ranked_grids,
    requirements_of,
)
from lightning_hanayo.planner.volume import TransformerLayer

HEADS = Requirement("blocks.0.attention", "heads", 4, "yz")
HIDDEN = Requirement("blocks.0", "hidden", 48, "z")


def test_all_grids_of_a_number() -> None:
    assert grids(1) == ((1, 1, 1),)
    assert len(set(grids(8))) == 10 and len(set(grids(12))) == 18
    assert all(prod(grid) == 12 for grid in grids(12))


def test_those_that_fit() -> None:
    assert grids_that_fit(8, [HEADS, HIDDEN]) == ((2, 1, 4), (2, 2, 2), (2, 4, 1), (4, 1, 2), (4, 2, 1), (8, 1, 1))
    assert grids_that_fit(3, [HEADS]) == ((3, 1, 1),)
    assert grids_that_fit(3, [Requirement("norm", "batch", 4, "x"), HEADS]) == ()


def test_the_nearest_come_first() -> None:
    assert nearest_grids((1, 4, 2), [HEADS]) == ((2, 2, 2), (2, 4, 1), (2, 1, 4))
    assert nearest_grids((1, 2, 2), [HEADS])[0] == (1, 2, 2)
    fewer = nearest_grids((1, 3, 1), [HEADS, Requirement("blocks.0", "samples", 4, "x")])
    assert fewer == ((1, 2, 1), (1, 1, 2), (2, 1, 1)), "where none of as many ranks fits"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (
            (1, 4, 2),
            "cube=(1, 4, 2): blocks.0.attention has heads=4, which doesn't divide over 8 ranks along y, z (4 x 2). "
            "Nearest that fit: cube=(2, 2, 2), cube=(2, 4, 1), cube=(2, 1, 4).",
        ),
        (
            (1, 1, 5),
            "cube=(1, 1, 5): blocks.0.attention has heads=4, which doesn't divide over 5 ranks along y, z (1 x 5) "
            "(and 1 more). Nearest that fit: cube=(5, 1, 1).",
        ),
    ],
)
def test_what_is_said_of_one_that_does_not_fit(grid: tuple[int, int, int], message: str) -> None:
    with pytest.raises(HanayoError) as caught:
        check_fit(grid, [HEADS, HIDDEN])
    assert str(caught.value) == message


def test_one_axis_is_named_alone_and_what_fits_passes() -> None:
    check_fit((3, 2, 2), [HEADS, HIDDEN])
    with pytest.raises(
        HanayoError, match=r"blocks.0 has hidden=48, which doesn't divide over 5 ranks along z\. Nearest"
    ):
        check_fit((1, 1, 5), [HIDDEN])


def test_the_best_moves_least_and_fits() -> None:
    layer = TransformerLayer(tokens=16384, hidden=4096, heads=32)
    ranked = ranked_grids(8, layer)
    volumes = [layer.volume(grid).total for grid in ranked]
    assert volumes == sorted(volumes) and len(ranked) == 10 and ranked[0] == best_grid(8, layer) == (4, 2, 1)
    narrow = TransformerLayer(tokens=64, hidden=4096, heads=2)
    assert best_grid(8, TransformerLayer(tokens=64, hidden=4096, heads=8)) == (1, 4, 2)
    assert best_grid(8, narrow) == (4, 2, 1), "two heads are all there is to share along y and z"
    assert requirements_of(narrow, "blocks.0")[0] == Requirement("blocks.0", "heads", 2, "yz")


def test_equal_volumes_are_ranked_by_storage() -> None:
    layer = TransformerLayer(tokens=3 * 64, hidden=64, heads=64)  # 12 Mh = 36 h^2 over z = over x, three times over
    ranked = ranked_grids(4, layer)
    equal = [(a, b) for a, b in zip(ranked, ranked[1:], strict=False) if layer.volume(a).total == layer.volume(b).total]
    assert equal
    assert all(layer.storage(a).total <= layer.storage(b).total for a, b in equal)

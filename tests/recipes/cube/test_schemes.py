"""The volumes of 1-D, 2-D and 2.5-D tensor parallelism, by hand and compared with 3-D."""

import pytest

from recipes.cube.meshes import TransformerLayer
from recipes.cube.schemes import OneD, TwoAndAHalfD, two_d


def layer(tokens: int, hidden: int) -> TransformerLayer:
    return TransformerLayer(tokens, hidden, hidden // 128)


@pytest.mark.parametrize(("m", "h"), [(16384, 4096), (4096, 4096), (131072, 8192), (512, 1024)])
def test_a_layer_on_a_cube_compared_with_one_dimension(m: int, h: int) -> None:
    assert layer(m, h).volume((2, 2, 2)).total == 4 * m * h + 3 * h**2
    assert OneD(8).volume(layer(m, h)) == 7 * m * h
    assert layer(m, h).volume((4, 4, 4)).total == 1.5 * m * h + 1.125 * h**2
    assert OneD(64).volume(layer(m, h)) == 7.875 * m * h


def test_the_cube_of_8_wins_where_there_are_more_tokens_than_features() -> None:
    wins = [layer(m, 4096).volume((2, 2, 2)).total < OneD(8).volume(layer(m, 4096)) for m in (2048, 4096, 8192)]
    assert wins == [False, False, True], "equal where they are equal"


def test_two_and_a_half_dimensions() -> None:
    one = layer(2048, 1024)
    mh, hh = 2048 * 1024, 1024**2
    assert two_d(2).volume(one) == 3 / 4 * (7 * mh + 12 * hh)
    assert TwoAndAHalfD(2, 2).volume(one) == 3 / 4 * (7 * mh / 2 + 12 * hh) + 12 * hh / 4


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_one_dimension_is_a_flat_mesh(ranks: int) -> None:
    one = layer(2048, 1024)
    assert one.volume((1, ranks, 1)).total == OneD(ranks).volume(one)

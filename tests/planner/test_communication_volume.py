"""The formulas of volume and storage, compared with shapes drawn by hand and with closed forms.

X [M, K]                         W [N, K]                      Y [M, N]
        z=0  z=1                         z=0  z=1                      y=0  y=1
x=0 y=0  .    .    gathered      y=0 x=0  .    .   gathered    x=0 z=0  .    .   summed
    y=1  .    .    over y            x=1  .    .   over x          z=1  .    .   over z
"""

import random
from math import prod

import pytest

from lightning_hanayo.divisibility import MeshSizes, meshes
from lightning_hanayo.planner.communication_volume import ExpertLayer, LinearLayer
from recipes.cube.meshes import Keep, TransformerLayer, best_mesh

MESHES: list[MeshSizes] = [
    (2, 2, 2),
    (1, 2, 2),
    (2, 1, 2),
    (2, 2, 1),
    (1, 1, 4),
    (4, 1, 1),
    (1, 4, 1),
    (2, 3, 1),
    (4, 4, 4),
]
KEEPS: tuple[Keep, ...] = ("gathered", "shards")
M, K, N = 48, 96, 144
LAYER = TransformerLayer(M, K, heads=4)


def gathered(whole: int, shard: int) -> int:
    """What an all-gather brings: all that wasn't there."""
    return whole - shard


def summed(partial: int, share: int) -> int:
    """What a reduce-scatter brings: the own share's part from each other rank."""
    return (partial // share - 1) * share


@pytest.mark.parametrize("row_parallel", [False, True])
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_collective_brings_what_is_missing(mesh: MeshSizes, row_parallel: bool) -> None:
    x, y, z = mesh if not row_parallel else (mesh[0], mesh[2], mesh[1])
    shard_x, shard_w, shard_y = M // (x * y) * K // z, N // (y * x) * K // z, M // (x * z) * N // y
    whole_x, whole_w, whole_y = M // x * K // z, N // y * K // z, M // x * N // y
    volume = LinearLayer(M, K, N, row_parallel).volume(mesh)
    assert (volume.gather_x, volume.scatter_dx) == (gathered(whole_x, shard_x), summed(whole_x, shard_x))
    assert (volume.gather_w, volume.scatter_dw) == (gathered(whole_w, shard_w), summed(whole_w, shard_w))
    assert (volume.scatter_y, volume.gather_dy) == (summed(whole_y, shard_y), gathered(whole_y, shard_y))
    assert volume.forward == volume.total / 2


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_the_totals_of_both_modes(mesh: MeshSizes) -> None:
    (x, y, z), ranks = mesh, prod(mesh)
    # q, k, v and up are column-parallel, out and down, where y and z trade roles, row-parallel
    of_x = M * K * ((y - 1) * 2 + (z - 1) * 5)
    of_w = 12 * K * K * (x - 1)
    of_y = M * K * ((z - 1) * 7 + (y - 1) * 2)
    own = of_x, of_w, of_y
    assert LAYER.volume(mesh).total == pytest.approx(2 * sum(own) / ranks)
    assert LAYER.volume(mesh, "shards").total == pytest.approx((3 * own[0] + 3 * own[1] + 2 * own[2]) / ranks)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_storage(mesh: MeshSizes) -> None:
    (x, y, z), kept = mesh, LinearLayer(M, K, N).storage(mesh)
    assert kept.weights == K * N / prod(mesh)
    assert kept.saved_inputs == pytest.approx(M * K / (x * z))
    assert kept.saved_weights == pytest.approx(K * N / (y * z) if x > 1 else 0)
    kept, shards = LAYER.storage(mesh), LAYER.storage(mesh, "shards")
    assert kept.weights == shards.weights == 12 * K * K / prod(mesh)
    assert (shards.saved_inputs, shards.saved_weights) == (7 * M * K / prod(mesh), 0)
    assert kept.total >= shards.total


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_generic_block_exchanges_its_activations(mesh: MeshSizes) -> None:
    (_, y, z), linear = mesh, LinearLayer(M, K, N)
    own, volume = linear.volume(mesh), linear.generic_volume(mesh)
    rows = M / prod(mesh)  # all-to-all: a rank keeps a z-th of its own tokens, sends the rest, and receives as much
    assert volume.exchange_x == volume.exchange_dx == pytest.approx(rows * K * (z - 1) / z)
    assert volume.exchange_y == volume.exchange_dy == pytest.approx(rows * N * (y - 1) / y)
    assert volume.forward - own.forward == pytest.approx((volume.total - own.total) / 2)


def test_the_exchange_costs_at_most_a_pth_of_a_cube() -> None:
    for p in (2, 3, 4):
        linear = LinearLayer(M, K, N)
        own, extra = linear.volume((p, p, p)).total, linear.generic_volume((p, p, p)).total
        assert own < extra <= own * (1 + 1 / p)
    assert LinearLayer(M, K, N).generic_volume((8, 1, 1)) == LinearLayer(M, K, N).volume((8, 1, 1)), (
        "each rank has whole tokens there anyway"
    )


def layer(tokens: int, hidden: int) -> TransformerLayer:
    return TransformerLayer(tokens, hidden, hidden // 128)


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_special_grids_are_the_known_schemes(ranks: int) -> None:
    one = layer(2048, 1024)
    weights = 12 * one.hidden**2
    assert one.volume((1, ranks, 1)).total == 8 * (ranks - 1) / ranks * one.tokens * one.hidden, "1-D: Megatron's"
    fsdp = [one.volume((ranks, 1, 1), keep).total for keep in KEEPS]
    assert fsdp == [times * (ranks - 1) / ranks * weights for times in (2, 3)], "ZeRO-3 gathers twice, sums once"


def test_weights_are_three_sevenths_of_a_square_layer_on_the_cube_of_2() -> None:
    volume = layer(4096, 4096).volume((2, 2, 2))
    assert (volume.gather_w + volume.scatter_dw) / volume.total == 3 / 7  # 43 %, paid again for each micro-batch


# tokens, h, ranks: the best mesh of powers of two, and how many times as much as it the cube moves
CUBES = [
    (16384, 4096, 8, (4, 2, 1), 1.46),
    (16384, 8192, 8, (2, 4, 1), 1.22),
    (16384, 4096, 64, (8, 4, 2), 1.27),
    (16384, 8192, 64, (4, 8, 2), 1.14),
    (131072, 4096, 8, (8, 1, 1), 6.24),
    (131072, 8192, 8, (8, 1, 1), 3.19),
    (131072, 4096, 64, (32, 2, 1), 3.14),
    (131072, 8192, 64, (16, 4, 1), 2.16),
]


@pytest.mark.parametrize(("m", "h", "ranks", "best", "times"), CUBES)
def test_the_cube_is_rarely_the_best_mesh(m: int, h: int, ranks: int, best: MeshSizes, times: float) -> None:
    side = round(ranks ** (1 / 3))
    assert best_mesh(ranks, layer(m, h)) == best
    one = layer(m, h)
    assert one.volume((side,) * 3).total / one.volume(best).total == pytest.approx(times, abs=0.005)
    assert one.volume(best).total == min(one.volume(mesh).total for mesh in meshes(ranks)), "all fit, or none better"


def test_hops_count_the_steps_of_each_ring() -> None:
    one = layer(2048, 1024)
    assert one.hops((2, 2, 2)) == 24 and one.hops((2, 2, 2), "shards") == 32 and one.hops((1, 1, 1)) == 0


@pytest.mark.parametrize(("mesh", "number", "chosen"), [((1, 2, 2), 16, 2), ((2, 1, 4), 12, 8), ((1, 2, 1), 4, 1)])
def test_a_token_is_sent_once_to_each_rank_of_its_experts(mesh: MeshSizes, number: int, chosen: int) -> None:
    """Tokens choose at random; M tokens of the micro-batch, of which each rank has M / P."""
    layer, choice = ExpertLayer(4000, 8, number, chosen, parameters=number), random.Random(1)
    ranks, own = mesh[1] * mesh[2], layer.of_a_rank(mesh)
    of_ranks = [{expert // own for expert in choice.sample(range(number), chosen)} for _ in range(layer.tokens)]
    others = sum(len(one) for one in of_ranks) * (ranks - 1) / ranks  # those that aren't at home
    assert layer.sent(mesh) == pytest.approx(others * layer.features / prod(mesh), rel=0.03)
    assert layer.parameters_of_a_rank(mesh) == own

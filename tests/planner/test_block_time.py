"""The time of a block is that of its real layers on a network without latency: their own order, replayed."""

from dataclasses import replace

import pytest

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.planner.block_time import time_block
from lightning_hanayo.planner.communication_volume import LinearLayer
from lightning_hanayo.planner.machine import Link, Machine
from lightning_hanayo.planner.model_facts import BlockFacts
from recipes.benchmarks.schemes.log import replay
from recipes.benchmarks.schemes.names import three_d
from recipes.benchmarks.tensor3d_rank import Case, dry_run

HIDDEN, BATCH, FLOPS, RATE = 64, 8, 5e9, 2.5e6
LINK = Link(0.0, 4 * RATE)


def block(tokens: int) -> BlockFacts:
    """The layer of the benchmark, for one sequence."""
    h = HIDDEN
    layers = (
        LinearLayer(tokens, h, 3 * h),
        LinearLayer(tokens, h, h, row_parallel=True),
        LinearLayer(tokens, h, 4 * h),
        LinearLayer(tokens, 4 * h, h, row_parallel=True),
    )
    return BlockFacts(layers, parameters=12 * h * h, attention_flops=4.0 * tokens * h * tokens)


def machine(flops: float = FLOPS) -> Machine:
    """Each rank on a node of its own."""
    return Machine("hosts", 1, 1e9, {"float32": ((1.0, flops),)}, 1e30, LINK, LINK)


@pytest.mark.parametrize(
    "mesh", [(2, 2, 2), (4, 2, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (1, 4, 2), (2, 1, 1), (1, 1, 1)]
)
@pytest.mark.parametrize("tokens", [16, 64])
def test_what_real_layers_take(mesh: MeshSizes, tokens: int) -> None:
    hosts = mesh[0] * mesh[1] * mesh[2]
    time = time_block(block(tokens), mesh, BATCH, machine(), dtype="float32", element=4)
    for layers in (1, 3):
        case = Case("", hosts, BATCH * tokens, HIDDEN, (), FLOPS, layers, batch=BATCH)
        real = replay(dry_run(case, three_d(mesh)), RATE)
        stage = time.stage(layers)
        assert stage.forward == pytest.approx(real.forward, rel=1e-9)
        assert stage.forward + stage.backward == pytest.approx(real.step, rel=1e-9)


def test_a_split_backward_takes_what_the_whole_one_does_without_a_link() -> None:
    one = time_block(block(32), (1, 1, 1), 4, machine(), dtype="float32", element=4).alone
    assert one.backward == pytest.approx(one.backward_input + one.backward_weight)
    assert one.backward == pytest.approx(2 * one.forward)


def test_parts_of_a_split_backward_wait_for_their_own_sums() -> None:
    """What is summed is the same, but the weights' sums have less to hide behind."""
    one = time_block(block(32), (4, 2, 1), 8, machine(), dtype="float32", element=4).alone
    assert one.backward_input + one.backward_weight > one.backward


def test_a_rank_alone_only_computes() -> None:
    one = time_block(block(32), (1, 1, 1), 2, machine(), dtype="float32", element=4).alone
    assert one.forward == pytest.approx(2 * block(32).flops / FLOPS)


def test_the_host_starts_operations_and_collectives() -> None:
    """A cube of so small a block is slower than one rank: the host is the limit, and has more to do."""
    calling = replace(
        machine(1e15), is_asynchronous=True, host_call=1e-5, host_collective=2e-5, within_node=Link(0, 1e15)
    )
    counted = replace(block(16), calls=10)
    alone, cube = (
        time_block(counted, mesh, 8, replace(calling, ranks_per_node=8), dtype="float32", element=4).alone
        for mesh in ((1, 1, 1), (2, 2, 2))
    )
    assert alone.forward == pytest.approx(10e-5)
    assert cube.forward == pytest.approx(10e-5 + 4 * 3 * 2e-5), "three for each of four products"
    assert cube.backward == pytest.approx(21e-5 + 4 * 3 * 2e-5)
    assert cube.backward_input + cube.backward_weight == pytest.approx(cube.backward)


def test_a_pair_hides_most_of_the_shorter_of_compute_and_communication() -> None:
    time = time_block(block(32), (2, 2, 2), BATCH, machine(), dtype="float32", element=4)
    both = [part.forward + part.backward for part in (time.computing, time.receiving, time.alone)]
    saved = time.saved_by_a_pair(1, split=False)
    assert both[2] - 1.03 * (both[0] + both[1]) < saved < both[2] - 1.03 * max(both[:2])


def test_pairs_save_nothing_where_the_host_is_the_limit() -> None:
    """Both actions need it."""
    busy = replace(machine(), is_asynchronous=True, host_call=1e3)
    time = time_block(replace(block(32), calls=10), (1, 8, 1), BATCH, busy, dtype="float32", element=4)
    assert time.saved_by_a_pair(1, split=True) == 0

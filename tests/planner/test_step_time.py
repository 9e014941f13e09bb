"""Closed forms agree with the schedules' own tables, and bytes that were counted with bytes that ranks held."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.planner.candidates import Candidate
from lightning_hanayo.planner.estimates import Measured, StepModel
from lightning_hanayo.planner.files import Profile
from lightning_hanayo.planner.machine import Link, machine
from lightning_hanayo.planner.model_facts import Code, ModelFacts
from lightning_hanayo.planner.ranking import make_plan
from lightning_hanayo.schedule import CostModel
from tests.planner.llamas import SEVEN_B, SEVENTY_B

H100 = machine("h100")
MEASURED = json.loads((Path(__file__).parents[2] / "docs" / "benchmarks" / "memory.json").read_text())["cases"]


def even(facts: ModelFacts) -> ModelFacts:
    """The linear layers of the stack alone: all stages are equal, and F = I = W, as the order of a run assumes."""
    block = replace(facts.blocks[0], attention_flops=0.0, traffic=0.0, calls=0.0)
    facts = replace(facts, blocks=(block,) * len(facts.blocks))
    return replace(facts, outside_parameters=0, computing_parameters=0, outside=Code())


@pytest.mark.parametrize("once", [False, True], ids=["", "once"])
@pytest.mark.parametrize("schedule", ["hanayo", "hanayo-zb"])
@pytest.mark.parametrize(
    ("pipe", "num_waves", "data"), [(2, 1, 4), (2, 4, 1), (4, 1, 1), (4, 2, 1), (4, 2, 4), (8, 1, 4), (8, 2, 1)]
)
def test_equal_stages(schedule: str, pipe: int, num_waves: int, data: int, once: bool) -> None:
    model = StepModel(even(SEVEN_B), H100)
    own = Candidate(data, pipe, num_waves=num_waves, num_microbatches=4 * pipe, schedule=schedule, runs_step_once=once)
    closed, simulated = model.closed_form(own), model.simulated(own)
    assert closed.seconds == pytest.approx(simulated.seconds, rel=(0.005 if data == 1 else 0.02) + 0.02 * once)
    assert closed.bubble == pytest.approx(simulated.bubble, abs=0.03 if once else 0.005)
    assert closed.memory.total == pytest.approx(simulated.memory.total, rel=0.02)


def test_other_ranks_wait_for_code_outside_the_stack_where_the_step_runs_once() -> None:
    facts = even(SEVEN_B)
    own = Candidate(1, 4, num_waves=2, num_microbatches=8, runs_step_once=True)
    small, large = (StepModel(replace(facts, outside=Code(flops)), H100) for flops in (0.0, 1e13))
    outside = 3 * 8 * large._outside(own)
    for estimate in (StepModel.closed_form, StepModel.simulated):
        assert estimate(large, own).seconds == pytest.approx(estimate(small, own).seconds + outside, rel=1e-6)
    whole, cut = (large.memory(replace(own, runs_step_once=once)).activations for once in (True, False))
    assert whole == pytest.approx(2 * cut, rel=0.01)  # of 8 micro-batches, and of 4


@pytest.mark.thorough
@pytest.mark.parametrize(("facts", "devices"), [(SEVEN_B, 64), (SEVENTY_B, 256)], ids=["7B", "70B"])
def test_the_five_best(facts: ModelFacts, devices: int) -> None:
    """With embedding and head on the first rank, and stages of different sizes."""
    model = StepModel(facts, H100)
    plan = make_plan(facts, H100, num_devices=devices, step=512, model=model)
    assert len(plan.best) == 5
    errors = [model.closed_form(one.candidate).seconds / one.seconds - 1 for one in plan.best]
    assert max(map(abs, errors)) < 0.02
    assert median(map(abs, errors)) < 0.01


@pytest.mark.parametrize("mesh", [(1, 1, 1), (2, 1, 1), (1, 2, 2)], ids=str)
def test_blocks_of_two_kinds(mesh: MeshSizes) -> None:
    """Half of the blocks take twice as much: a step is between those of equal blocks, whichever block is the first."""
    small = even(SEVEN_B).blocks[0]
    large = replace(small, products=2 * small.products, parameters=2 * small.parameters, saved=2 * small.saved)
    of = {
        blocks: StepModel(replace(even(SEVEN_B), blocks=blocks), H100).closed_form(
            Candidate(mesh=mesh, schedule="1f1b")
        )
        for blocks in ((small,) * 8, (large,) * 8, (small, large) * 4, (large, small) * 4)
    }
    least, most, *mixed = of.values()
    for one in mixed:
        assert one.seconds == pytest.approx((least.seconds + most.seconds) / 2, rel=0.01)
        assert one.memory.total == pytest.approx((least.memory.total + most.memory.total) / 2, rel=0.01)


def test_blocks_without_linear_layers() -> None:
    block = replace(SEVEN_B.blocks[0], products=())
    facts = replace(SEVEN_B, blocks=(block,) * 8)
    for mesh in ((1, 1, 1), (2, 2, 1)):
        assert StepModel(facts, H100).closed_form(Candidate(1, 2, mesh, num_microbatches=4)).seconds > 0


def test_messages_are_slower_between_nodes() -> None:
    slow = replace(H100, between_nodes=Link(1e-3, 1e9), ranks_per_node=4)
    own = Candidate(1, 8, num_waves=2, num_microbatches=16)
    here, there = (StepModel(SEVEN_B, rates) for rates in (replace(slow, ranks_per_node=8), slow))
    assert there.closed_form(own).seconds > here.closed_form(own).seconds
    assert there.simulated(own).seconds > here.simulated(own).seconds


def test_sharding_takes_less_memory_and_recomputation_more_time() -> None:
    model, own = StepModel(SEVEN_B, H100), Candidate(4, 4, num_waves=2, num_microbatches=16)
    plain = model.simulated(own)
    sharded = model.simulated(replace(own, shard_optimizer=True))
    assert sharded.memory.optimizer == pytest.approx(plain.memory.optimizer / 4)
    again = model.simulated(replace(own, schedule="hanayo", recompute=True))
    assert again.memory.activations < 0.2 * plain.memory.activations
    assert again.seconds > plain.seconds


@pytest.mark.parametrize("pipe", [1, 2])
def test_weights_that_are_gathered_once_a_batch(pipe: int) -> None:
    slow = replace(H100, within_node=Link(2e-5, 25e9))
    model = StepModel(SEVEN_B, slow)
    own = Candidate(1, pipe, (4, 2, 1), num_microbatches=16, samples=4, schedule="1f1b" if pipe == 1 else "hanayo-zb")
    kept = replace(own, cube_weights="batch")
    for estimate in (model.closed_form, model.simulated):
        each, once = estimate(own), estimate(kept)
        assert once.seconds < 0.9 * each.seconds
        assert once.memory.activations < each.memory.activations, "micro-batches share the weights"
        gathered = len(SEVEN_B.blocks) / pipe * SEVEN_B.of_a_rank(4, (4, 2, 1)).gathered
        more = once.memory.gathered - each.memory.gathered
        assert more == pytest.approx(gathered * (SEVEN_B.element + SEVEN_B.gradient_bytes))
    if pipe == 1:  # one micro-batch gathers its weights once either way
        each, once = (model.closed_form(replace(one, num_microbatches=1)) for one in (own, kept))
        assert once.seconds == pytest.approx(each.seconds)


@pytest.mark.parametrize(("device", "bandwidth"), [("h100", 60e9), ("cpu", 4e6)])
@pytest.mark.parametrize(("pipe", "num_waves"), [(1, 1), (2, 2)])
def test_pairs_hide_collectives_and_hold_a_micro_batch_more(
    device: str, bandwidth: float, pipe: int, num_waves: int
) -> None:
    rates = replace(machine(device), within_node=Link(2e-5, bandwidth), ranks_per_node=16)
    model = StepModel(even(SEVEN_B), rates)
    schedule = "1f1b" if pipe == 1 else "hanayo-zb"
    own = Candidate(1, pipe, (2, 2, 2), num_waves, samples=4, num_microbatches=16, schedule=schedule)
    at_once = replace(own, pairs=True)
    closed, simulated = model.closed_form(at_once), model.simulated(at_once)
    assert closed.seconds == pytest.approx(simulated.seconds, rel=0.03)
    assert simulated.seconds < 0.96 * model.simulated(own).seconds
    assert closed.memory.total == pytest.approx(simulated.memory.total, rel=0.05)
    more = simulated.memory.activations / model.simulated(own).memory.activations
    assert more == pytest.approx(1 + 1 / pipe)


@pytest.mark.parametrize("schedule", ["hanayo", "hanayo-zb"])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (2, 1, 1)])
def test_micro_batches_hold_the_weights_that_autocast_casts(mesh: tuple[int, int, int], schedule: str) -> None:
    own = Candidate(1, 2, mesh, samples=4, num_microbatches=4, schedule=schedule)
    true, mixed = (
        held.activations + held.gathered * (prod(mesh) == 1)
        for each in (SEVEN_B.element, 2 * SEVEN_B.element)
        for held in [StepModel(replace(even(SEVEN_B), parameter_bytes=each), H100).memory(own)]
    )
    is_split = schedule == "hanayo-zb" and prod(mesh) == 1
    under_way, blocks = 1 if is_split else 2, len(SEVEN_B.blocks) / 2
    weights = SEVEN_B.mean(lambda one: one.sharded_parameters) / prod(mesh) * SEVEN_B.element
    is_gathered = mesh[0] > 1  # then what a micro-batch holds is counted either way
    assert mixed - true == pytest.approx(0 if is_gathered else under_way * blocks * weights)


def test_the_host_is_the_limit_where_its_calls_take_longer_than_the_device() -> None:
    own = Candidate(1, 1, (1, 4, 2), num_microbatches=8, schedule="1f1b")
    slow_host = replace(H100, host_call=1e-3)
    assert StepModel(SEVEN_B, slow_host).closed_form(own).seconds > 8 * 32 * 40 * 1e-3
    at_once = replace(slow_host, is_asynchronous=False)
    both = StepModel(SEVEN_B, at_once).closed_form(own).seconds
    assert both > StepModel(SEVEN_B, slow_host).closed_form(own).seconds, "the host's time and the device's"


def test_measured_blocks_take_the_place_of_counted_ones() -> None:
    stages = 8
    costs = CostModel((0.04,) * stages, (0.04,) * stages, (0.03,) * 7 + (0.06,), message=0.001)
    measured = Measured.of(Profile("hanayo-zb", 2, 2, 4, (4,) * stages, costs), samples=2)
    assert measured.block.forward == pytest.approx(0.04 / 8)
    assert measured.block.backward_weight == pytest.approx(0.03 / 8)
    assert measured.outside == pytest.approx(0.03 / 2 / 3)
    own = Candidate(1, 2, num_waves=2, num_microbatches=8)
    counted, real = StepModel(SEVEN_B, H100), StepModel(SEVEN_B, H100, measured)
    assert real.closed_form(own).seconds == pytest.approx(8 * (16 * 0.11 / 8 + 3 * measured.outside), rel=0.1)
    in_a_cube = replace(own, mesh=(1, 2, 1))
    slower = real.closed_form(own).seconds / counted.closed_form(own).seconds
    assert slower < real.closed_form(in_a_cube).seconds / counted.closed_form(in_a_cube).seconds * 1.5


@pytest.mark.parametrize("case", MEASURED, ids=lambda case: f"{case['model']} {Candidate(**case['layout'])}")
def test_bytes_are_those_that_ranks_held(case: dict[str, Any]) -> None:
    """On the fullest rank; other ranks hold more buffers of messages than planned."""
    pytest.importorskip("transformers")
    from tests.strategy.planning.counted import counted

    own = Candidate(**case["layout"] | {"mesh": tuple(case["layout"]["mesh"])})
    model, held = StepModel(counted(case["model"]), H100), max(case["measured"])
    estimate = model.simulated(own)
    assert estimate.memory.total == pytest.approx(held, rel=0.05)
    assert model.closed_form(own).memory.total == pytest.approx(held, rel=0.055)
    for rank, num_bytes in enumerate(case["measured"]):
        pipeline_rank = own.topology.coordinates(rank)[1]
        assert estimate.of_ranks[pipeline_rank].total == pytest.approx(num_bytes, rel=0.1)

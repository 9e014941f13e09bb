"""Plans: what is considered, what is left out, what comes first, and what is said if nothing fits."""

from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.planner.candidates import BatchesOfStep, Choices, candidates
from lightning_hanayo.planner.estimates import Estimate
from lightning_hanayo.planner.machine import Link, machine
from lightning_hanayo.planner.model_facts import Code
from lightning_hanayo.planner.ranking import TOO_LARGE, make_plan, strategy_options
from tests.planner.llamas import SEVEN_B, SEVENTY_B, llama

H100 = machine("h100")
SMALL = llama(8, 256, 768, 8, 8)


@given(some.integers(1, 48), some.integers(1, 96))
@settings(max_examples=15, deadline=None)
def test_each_layout_has_all_devices_and_the_samples_that_were_asked_for(devices: int, samples: int) -> None:
    for one in candidates(SMALL, devices, samples, Counter()):
        assert one.topology.world_size == devices
        assert one.samples_per_step == samples
        assert one.samples % one.mesh[0] == 0
        assert all(required.holds(one.mesh) for required in SMALL.required)
        assert one.pipe * one.stages_per_rank <= len(SMALL.blocks)
        assert one.num_microbatches >= one.pipe


def test_what_cubes_may_choose() -> None:
    """What makes no difference, and what a run would refuse, is no choice."""
    found = list(candidates(SMALL, 8, 64, Counter()))
    in_cubes = [one for one in found if one.cube_size > 1 and one.num_microbatches > 1]
    assert not any(one.pairs or one.cube_weights == "batch" for one in found if one not in in_cubes)
    assert not any(one.pairs and one.recompute for one in found)
    gathering = {(one.cube_weights, one.pairs) for one in in_cubes if one.mesh[0] > 1}
    assert gathering == {("microbatch", False), ("microbatch", True), ("batch", False), ("batch", True)}
    assert {one.cube_weights for one in in_cubes if one.mesh[0] == 1} == {"microbatch"}


@pytest.mark.parametrize("pairs", [False, True])
def test_what_has_been_decided(pairs: bool) -> None:
    refused: Counter[str] = Counter()
    found = list(candidates(SMALL, 8, 64, refused, choices=Choices(("batch",), (pairs,))))
    in_cubes = [one for one in found if one.cube_size > 1 and one.num_microbatches > 1]
    assert {one.pairs for one in in_cubes} == {pairs}
    assert {one.cube_weights for one in in_cubes if one.mesh[0] > 1} == {"batch"}
    assert any(one.recompute for one in in_cubes) != pairs
    assert bool(refused["pairs need registered blocks, and no recomputation"]) == pairs


def test_blocks_that_are_not_registered_have_no_pairs_and_share_samples() -> None:
    generic = replace(
        SMALL.blocks[0], products=tuple(replace(one, is_generic=True) for one in SMALL.blocks[0].products)
    )
    found = list(candidates(replace(SMALL, blocks=(generic,) * 8), 8, 64, Counter()))
    assert not any(one.pairs for one in found)
    assert all(one.samples % one.cube_size == 0 for one in found), "each rank of a cube has samples of its own"


def test_embedding_and_head_stay_sharded_where_a_run_accepts_it_and_memory_is_short() -> None:
    words = 2e9  # bytes of the values, and of their gradients
    large = replace(SMALL, outside_parameters=round(words / SMALL.parameter_bytes), vocabulary_bytes=words)
    large = replace(large, vocabulary_gradients=words * large.gradient_bytes / large.parameter_bytes)
    assert {one.cube_outside for one in candidates(large, 8, 64, Counter())} == {"share"}, "whole logits"
    large = replace(large, by_rows=(Code(), large.outside))
    found = list(candidates(large, 8, 64, Counter()))
    assert not any(one.cube_outside == "tokens" and (one.pairs or one.cube_size == 1) for one in found)
    assert {one.cube_outside for one in found if one.cube_size > 1} == {"share", "tokens"}
    decided = candidates(large, 8, 64, Counter(), choices=Choices(cube_outside=("replicate",)))
    assert {one.cube_outside for one in decided} == {"replicate"}
    options: Any = {"num_devices": 8, "step": 64, "accept": lambda one: one.mesh == (2, 2, 2)}
    chosen = make_plan(large, H100, memory=5e9, **options).first.candidate
    assert strategy_options(chosen)["cube_outside"] == "tokens"
    with pytest.raises(HanayoError, match="for gathered "):
        make_plan(large, H100, memory=5e9, choices=Choices(cube_outside=("share",)), **options)


def test_pairs_are_proposed_where_they_win() -> None:
    slow = replace(H100, within_node=Link(2e-5, 60e9))

    def fastest(choices: Choices) -> Estimate:
        return make_plan(
            SEVEN_B,
            slow,
            num_devices=8,
            step=128,
            top=1,
            accept=lambda one: one.mesh == (2, 2, 2),
            choices=choices,
        ).first

    free, without = fastest(Choices()), fastest(Choices(pairs=(False,)))
    assert free.candidate.pairs and free.seconds < 0.95 * without.seconds


def test_the_fastest_comes_first_and_fits() -> None:
    plan = make_plan(SEVEN_B, H100, num_devices=8, step=16)
    times = [one.seconds for one in plan.best]
    assert times == sorted(times)
    assert all(one.memory.total <= plan.memory == 72e9 for one in plan.best)
    topologies = {(one.candidate.pipe, one.candidate.mesh) for one in plan.best}
    assert len(topologies) == len(plan.best) == 5
    assert plan.num_considered == len(plan.fitting) + plan.refused[TOO_LARGE]
    assert 0 < plan.mfu(plan.first) < 1


def test_less_memory_never_makes_a_plan_faster() -> None:
    unpaired = Choices(pairs=(False,))
    times = [
        make_plan(SEVEN_B, H100, num_devices=8, step=32, memory=memory, top=1, choices=unpaired).first.seconds
        for memory in (72e9, 40e9)
    ]
    assert times == sorted(times)


def test_on_one_device_there_is_one_topology() -> None:
    plan = make_plan(SMALL, H100, num_devices=1, step=8)
    assert {prod(one.candidate.topology.sizes) for one in plan.best} == {1}


def test_the_nearest_miss_says_what_is_missing() -> None:
    with pytest.raises(HanayoError) as caught:
        make_plan(SEVENTY_B, H100, num_devices=8, step=64)
    message = str(caught.value)
    assert message.startswith("no layout of 69 billion parameters fits into 72.0 GB on 8 devices. The nearest, P=")
    assert "GB too much; most of it, " in message
    assert "GB, for optimizer (docs" in message
    assert "It would fit with 32 devices of this size, or " in message


def test_a_model_that_no_number_of_devices_holds() -> None:
    with pytest.raises(HanayoError, match=r"a smaller model \(tried: up to 64 devices\)"):
        make_plan(SEVEN_B, H100, num_devices=1, step=1, memory=1e6)


def test_samples_that_divide_over_no_layout() -> None:
    with pytest.raises(HanayoError, match=r"on 7 devices divides 1 sample per step: .*don't divide"):
        make_plan(replace(SMALL, blocks=SMALL.blocks[:2]), H100, num_devices=7, step=1)


@pytest.mark.thorough
def test_a_thousand_devices() -> None:
    plan = make_plan(SEVENTY_B, H100, num_devices=1024, step=1024)
    assert len(plan.best) == 5
    assert plan.num_considered > 5000


@pytest.mark.parametrize(("batch_size", "data"), [(7, 1), (12, 1), (12, 2), (100, 1), (100, 4), (101, 4)])
def test_batches_of_a_given_size(batch_size: int, data: int) -> None:
    plan = make_plan(
        SMALL,
        H100,
        num_devices=4,
        step=BatchesOfStep(batch_size, 3),
        memory=1e12,
        top=2,
        accept=lambda one: one.data == data and one.cube_size == 1,
    )
    assert {(one.candidate.batch_size, one.candidate.accumulate) for one in plan.best} == {(batch_size, 3)}


def test_many_samples_take_no_time() -> None:
    plan = make_plan(SMALL, H100, num_devices=4, step=10**9, top=1)
    assert plan.first.candidate.samples_per_step == 10**9

"""What holds of any layout: closed forms are near the simulation, and no predicted memory is below what is stored."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some

from lightning_hanayo.planner.candidates import Candidate
from lightning_hanayo.planner.estimates import StepModel
from lightning_hanayo.planner.machine import Link, machine
from lightning_hanayo.planner.model_facts import ModelFacts
from tests.planner.llamas import SEVEN_B
from tests.planner.test_step_time import even


@some.composite
def layouts(draw: some.DrawFn) -> Candidate:
    """Of even stages. Pipelines have two micro-batches per rank or more, as plans have."""
    pipe = draw(some.sampled_from([1, 2, 3, 4, 6]))
    recompute = draw(some.booleans())
    return Candidate(
        data=draw(some.sampled_from([1, 2, 8])),
        pipe=pipe,
        num_waves=draw(some.sampled_from([1, 2, 4])) if pipe > 1 else 1,
        num_microbatches=draw(some.integers(2 * pipe, 3 * pipe)),
        samples=draw(some.sampled_from([1, 2])),
        schedule="1f1b" if pipe == 1 else "hanayo" if recompute else "hanayo-zb",
        recompute=recompute,
        shard_optimizer=draw(some.booleans()),
    )


def stack(own: Candidate) -> ModelFacts:
    """A stack with a block for each stage."""
    facts = even(SEVEN_B)
    return replace(facts, blocks=facts.blocks[:1] * (own.pipe * own.stages_per_rank))


@given(layouts(), some.floats(0.0, 0.4))
@settings(max_examples=5, derandomize=True)
def test_closed_forms_of_even_stages(own: Candidate, hop: float) -> None:
    """With messages of up to 0.4 of a stage's forward: longer ones aren't hidden, which only simulations know."""
    assume(own.schedule != "hanayo" or own.num_microbatches % own.pipe != 1)  # then the closed form is too high
    own = replace(own, data=1, shard_optimizer=False)
    facts, rates = stack(own), replace(machine("h100"), host_action=0.0)
    stage = StepModel(facts, rates).closed_form(Candidate(schedule="1f1b")).seconds / 3 / len(facts.blocks)
    link = Link(hop * stage * own.samples, 1e30)
    model = StepModel(facts, replace(rates, within_node=link, between_nodes=link))
    closed, simulated = model.closed_form(own), model.simulated(own)
    is_full = own.num_microbatches % own.pipe == 0
    assert closed.seconds == pytest.approx(simulated.seconds, rel=0.02 if is_full else 0.04)
    assert closed.memory.total == pytest.approx(simulated.memory.total, rel=0.04 if own.recompute else 0.02)


@given(layouts(), some.sampled_from([(1, 1, 1), (2, 1, 1), (1, 2, 2), (2, 2, 2)]), some.integers(0, 3), some.booleans())
@settings(max_examples=40, derandomize=True)
def test_memory_is_at_least_what_is_stored(
    own: Candidate, mesh: tuple[int, int, int], frozen: int, is_simulated: bool
) -> None:
    """The ranks of a replica together have room for all weights, gradients and states."""
    own = replace(own, mesh=mesh, samples=8)
    block = SEVEN_B.blocks[0]
    kinds = block, replace(block, frozen=block.parameters * frozen // 4)
    facts = replace(SEVEN_B, blocks=tuple(kinds[place % 2] for place in range(2 * own.pipe * own.stages_per_rank)))
    model = StepModel(facts, machine("h100"))
    memory = (model.simulated if is_simulated else model.closed_form)(own).memory
    stored = memory.weights + memory.gradients + memory.optimizer
    assert memory.total > stored
    trained = facts.parameters - sum(one.frozen for one in facts.blocks)
    each = facts.gradient_bytes + facts.optimizer_bytes / (own.data if own.shard_optimizer else 1)
    whole = facts.parameters * facts.parameter_bytes + trained * each
    assert own.pipe * own.cube_size * memory.total >= (1 - 1e-9) * whole

"""The benchmark of layouts: what it runs is valid and exact, and its report says how well a plan ranks."""

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_hanayo.planner.candidates import Candidate
from lightning_hanayo.planner.estimates import StepModel
from lightning_hanayo.planner.machine import Link
from recipes.benchmarks.layouts.__main__ import (
    contender_action,
    draw,
    link_of,
    main,
    outcome_of,
    predict_turn,
    runtime_of,
    spearman,
    text,
)
from recipes.benchmarks.layouts.cases import HOSTS, INSTANT, PROBES, Model, contenders, is_megatron, layouts
from recipes.benchmarks.layouts.rank import MESSAGE_FLOATS, PROBED, Plan, Record, check
from tests.harness.pool import Pool

MODEL = Model()
LINK = Link(1e-3, 2e7)


def test_all_layouts_have_all_hosts_and_all_samples() -> None:
    found = layouts(MODEL.samples)
    assert len(set(found)) == len(found) >= 24
    for one in found:
        assert one.topology.world_size == HOSTS
        assert one.samples_per_step == MODEL.samples
        assert one.samples % one.mesh[0] == 0
        assert MODEL.layers % (one.pipe * one.stages_per_rank) == 0
    assert sum(map(is_megatron, found)) == 1


@pytest.mark.parametrize("pipe", [8, 4])
def test_all_contenders_have_all_hosts_and_as_many_micro_batches(pipe: int) -> None:
    for one in contenders(pipe):
        assert one.pipe * one.pipelines == HOSTS
        assert one.microbatches * one.pipelines == HOSTS
        assert one.share * one.pipe == HOSTS


def compare() -> list[float]:
    dist.init_process_group("gloo")
    small = Model(layers=8, hidden=16, seq=8, samples=8)
    chosen = (
        Candidate(4, 1, samples=2, schedule="1f1b"),
        Candidate(2, 2, num_waves=2, samples=1, num_microbatches=4),
        Candidate(1, 2, (2, 1, 1), num_waves=1, samples=2, num_microbatches=4),
        Candidate(1, 1, (1, 2, 2), samples=8, schedule="1f1b"),
    )
    return check(dist.get_rank(), Plan(small, chosen, 1))


@pytest.mark.thorough
def test_gradients_are_those_of_one_process(pool: Pool) -> None:
    for errors in pool.run(4, compare):
        assert len(errors) == 4
        assert max(errors) < 1e-10


@pytest.mark.thorough
def test_what_the_runtime_takes_is_found_from_two_layouts() -> None:
    machine = MODEL.instant.machine(LINK, action=5e-4, layer=2e-4)
    seconds = [StepModel(MODEL.instant.facts, machine).simulated(one).seconds for one in PROBES]
    assert runtime_of(MODEL, LINK, seconds) == pytest.approx((5e-4, 2e-4), rel=1e-3)
    instant = predict_turn(INSTANT, 1e-3, 7e-4, 0.0)
    assert contender_action(instant, 1e-3) == pytest.approx(7e-4, rel=1e-6)


def records(plan: Plan, slower: float = 1.0) -> list[Record]:
    """Of hosts that take as long as is predicted, without a cost of the runtime; the first layout is slower."""
    machine = plan.model.machine(LINK)
    model, instant = StepModel(plan.model.facts, machine), StepModel(MODEL.instant.facts, MODEL.instant.machine(LINK))
    steps = [model.simulated(one).seconds for one in plan.layouts]
    steps[0] *= slower
    own = Record(
        collective={size: LINK.seconds(size * (HOSTS - 1)) for size in PROBED},
        messages={1: 1e-3, MESSAGE_FLOATS: 2e-3},
        runtime=[*(instant.simulated(one).seconds for one in PROBES), predict_turn(INSTANT, 1e-3, 0.0, 0.0)],
        steps=[[step, 1.1 * step, step] for step in steps],
        contenders={pipe: [[predict_turn(one, 2e-3, 0.0)] * 3 for one in contenders(pipe)] for pipe in plan.pipes},
    )
    return [own] * HOSTS


@pytest.mark.thorough
def test_the_report_of_hosts_that_do_what_is_predicted(tmp_path: Path) -> None:
    plan = Plan(MODEL, tuple(layouts(MODEL.samples)), 3, (8, 4))
    outcome = outcome_of(plan, records(plan))
    assert outcome.correlation == 1
    assert outcome.median_error == pytest.approx(0, abs=1e-6)
    assert outcome.chosen is outcome.steps[0]
    assert outcome.megatron.measured.median > outcome.chosen.measured.median
    page = text(outcome, ["a machine"], MODEL)
    assert "Spearman's correlation of predicted and measured steps 1.000; median error 0.0 %" in page
    assert page.count("+0.0%") >= len(plan.layouts) + 12
    assert outcome.plain()["chosen_over_best"] == 1
    draw(outcome, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 1000


def test_a_layout_that_is_slower_than_predicted() -> None:
    plan = Plan(MODEL, tuple(layouts(MODEL.samples)), 3)
    outcome = outcome_of(plan, records(plan, slower=2.0))
    assert min(one.error for one in outcome.steps) == pytest.approx(-0.5)
    assert outcome.correlation < 1


def test_links_from_two_sizes() -> None:
    plan = Plan(MODEL, tuple(layouts(MODEL.samples)[:1]), 1)
    found = link_of(records(plan))
    assert (found.latency, found.bandwidth) == pytest.approx((LINK.latency, LINK.bandwidth))


def test_the_page_says_what_was_measured() -> None:
    folder = Path(__file__).parents[3] / "docs" / "benchmarks"
    figures, page = json.loads((folder / "layouts.json").read_text()), (folder / "layouts.md").read_text()
    errors = [abs(one["error"]) for one in figures["steps"]]
    assert len(errors) == len(layouts(MODEL.samples))
    assert f"steps is {figures['correlation']:.3f} over {len(errors)} layouts" in page
    assert f"median error is {100 * figures['median_error']:.1f} %, the greatest {100 * max(errors):.1f} %" in page
    assert figures["chosen_over_best"] == 1
    assert f"takes {figures['chosen_over_megatron']:.2f} of Megatron's rule" in page
    assert figures["correlation"] >= 0.95
    assert figures["median_error"] <= 0.05


def test_tables_are_what_the_planner_says_of_the_measured_run(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[3] / "docs" / "benchmarks"
    assert main(["--from", str(folder / "layouts.json")]) == 0
    assert capsys.readouterr().out.strip() == (folder / "layouts-tables.md").read_text().strip()


def test_spearman() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == -1

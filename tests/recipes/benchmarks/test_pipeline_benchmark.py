"""A minimal pipeline benchmark: both runtimes give one process's gradients, and all figures exist.

two ranks, two micro-batches, a millisecond of sleep, one round: correctness, not time
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from recipes.benchmarks import pipeline
from recipes.benchmarks.case import NAMES, Candidate, Case, candidates
from recipes.benchmarks.emulated import expected
from recipes.benchmarks.pipeline import main
from recipes.benchmarks.report import outcome_of
from recipes.benchmarks.rounds import Record, Records, RoundTiming
from tests.harness.limits import real_seconds

CASE = Case(2, 2, 0.001, 0.001, 0.001, 64, steps=1)
GRADIENTS, LOSSES = expected(2, 2, CASE.width)


@pytest.mark.thorough
def test_both_runtimes_run_every_candidate_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "_timeout", lambda plan: real_seconds(120))
    files = {what: tmp_path / f"found.{what}" for what in ("json", "md", "png")}
    sizes = ["--ranks", "2", "--microbatches", "2", "--waves", "1", "--forward-ms", "1", "--message-bytes", "64"]
    writing = ["--json", str(files["json"]), "--table", str(files["md"]), "--picture", str(files["png"])]
    assert main([*sizes, *writing, "--rounds", "1", "--ordinary"]) == 0
    (case,) = json.loads(files["json"].read_text())["cases"]
    assert [result["name"] for result in case["results"]] == list(NAMES)
    assert case["refused"] == {}
    assert 0 < case["hop"] == case["case"]["planned_message"] < 0.1
    for result in case["results"]:
        assert (result["max_error"] or 0) < 1e-5 and (result["max_error"] is None) == (result["runtime"] == "bare")
        assert result["step"]["median"] > 0.999 * result["ideal_step"], result["label"]
        assert result["peak_activations"] <= 2
        assert result["cpu"] > 0 and result["overhead_us"] > 0 and result["ratio_to_peer"] > 0
    assert files["md"].read_text() == capsys.readouterr().out.rstrip("\n") + "\n"
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def records(starts: tuple[float, float], ends: tuple[float, float], gradient: float = GRADIENTS[1]) -> list[Records]:
    """Two ranks' records of our 1f1b and of torch's, which takes twice as long."""
    found = []
    for rank in range(2):
        mine = {rank: (GRADIENTS[0], gradient)[rank]}
        losses = tuple(LOSSES) if rank else ()
        made = {}
        for name, factor in (("1f1b", 1.0), ("torch-1f1b", 2.0)):
            timing = RoundTiming(starts[rank] * factor, (ends[rank] * factor,), cpu=0.5)
            made[Candidate(name, 1)] = Record((timing,), mine, losses, (0.009,), (2.0, 1.0), (4, 4), 2)
        found.append(Records(made, {}, oversleep=1e-5, hop=None))
    return found


def test_a_step_is_from_the_first_start_to_the_last_end() -> None:
    ours, torchs = outcome_of(CASE, records((1.0, 1.001), (1.010, 1.011))).results
    assert ours.step.median == pytest.approx(0.011)
    assert ours.bubble is not None and ours.bubble.median == pytest.approx(1 - 0.006 / 0.011)
    assert ours.ideal_bubble == pytest.approx(1 / 3)
    assert (ours.ratio_to_peer, torchs.ratio_to_peer) == (pytest.approx(0.5), 1.0)
    assert ours.overhead_us == pytest.approx(500)
    assert ours.peak_activations == 2 and ours.max_error == 0


def test_wrong_and_missing_gradients_are_detected() -> None:
    def error(gradient: float) -> float:
        return outcome_of(CASE, records((0.0, 0.0), (1.0, 1.0), gradient)).results[0].max_error

    assert error(2 * GRADIENTS[1]) == pytest.approx(1.0)
    assert math.isnan(error(math.nan))


@pytest.mark.thorough
def test_a_planned_number_of_waves_is_that_of_the_measured_times() -> None:
    """Messages of 0.8 ms; without the runtime's time per action two waves are faster."""
    (planned,) = candidates(["hanayo-zb-planned"], [1, 2])
    assert planned.label == "hanayo-zb W planned"
    case = Case(4, 8, 0.02, 0.02, 0.02, 64, steps=1, planned_message=0.0008)
    stages = [replace(case, per_action=seconds).schedule(planned).num_stages for seconds in (0.0, 0.0004)]
    assert stages == [16, 8]


def test_candidates_are_listed_once_with_each_possible_number_of_waves() -> None:
    labels = [one.label for one in candidates(["1f1b", "zbv", "torch-interleaved-zb", "hanayo"], [1, 2])]
    assert labels == ["1f1b", "zbv", "torch interleaved-zb V=2", "torch interleaved-zb V=4", "hanayo W=1", "hanayo W=2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--schedules", "hanyo"], "did you mean 'hanayo'?"), (["--ranks", "1"], "a pipeline has at least 2")],
)
def test_bad_arguments_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1

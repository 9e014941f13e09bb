"""The verdict names what differs first, where it belongs, and the likely cause."""

import json
from io import StringIO
from math import inf
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_hanayo.checking.case import RankFailure, RankResult, Stage
from lightning_hanayo.checking.comparison import EXACT, Comparison, Key, Values, compare
from lightning_hanayo.checking.verdict import (
    Place,
    Verdict,
    as_json,
    print_verdict,
    verdict_of_failure,
    verdict_of_layout,
    verdict_of_microbatches,
)

# Four blocks, one per stage, in a wave over two ranks.
STAGES = tuple(Stage(range(i, i + 1), rank) for i, rank in enumerate([0, 1, 1, 0]))
PLACE = Place("model.layers", STAGES, has_cube=False)
NAMES = ("embedding", *(f"model.layers.{i}.weight" for i in range(4)), "head")
ONES = torch.ones(2, dtype=torch.float64)


def values() -> Values:
    """Two steps of a training."""
    return {
        key: ONES
        for step in range(2)
        for key in (
            Key(step, "loss", f"batch {step}"),
            *(Key(step, "gradient", name) for name in NAMES),
            *(Key(step, "weight", name) for name in NAMES),
            Key(step, "buffer", "model.layers.2.mean"),
            Key(step, "log", f"accuracy (batch {step})"),
        )
    }


def verdict(*changed: Any, factor: float = 2.0, place: Place = PLACE, **one_process: Any) -> Verdict:
    """The verdict if the values of these keys are multiplied by `factor`, or by one number each."""
    expected = values()
    actual = expected | {key: expected[key] * (factor or 2.0 + i) for i, key in enumerate(changed)}
    result = RankResult(expected, forward_order=NAMES, stack="model.layers", **one_process)
    return verdict_of_layout(compare(expected, [actual], EXACT, NAMES), place, result, ())


def gradients(*indices: int, step: int = 0) -> list[Key]:
    return [Key(step, "gradient", NAMES[i]) for i in indices]


def test_equal_values_are_exact() -> None:
    assert verdict().outcome == "exact"
    assert verdict().summary == "the layout is exact (largest difference 0e+00)"
    assert verdict().exit_code == 0


@pytest.mark.parametrize(
    ("changed", "where", "cause"),
    [
        ([Key(0, "loss", "batch 0")], "computed by the step on pipeline rank 0", "The forward itself is different"),
        (gradients(0, 1, 2, 3, 4, 5), "outside the stack model.layers", "All of them are 2 times what they should be"),
        (gradients(0, 5), "outside the stack model.layers, on pipeline rank 0", "Only parameters outside the stack"),
        (gradients(2, 3), "block 1 of model.layers, on pipeline rank 1, stage 1", "of blocks on pipeline rank 1"),
        (gradients(3), "block 2 of model.layers, on pipeline rank 1, stage 2", f"Only the gradient of {NAMES[3]}"),
        (gradients(0, 1, 2), "outside the stack", f"Gradients are right from {NAMES[3]} on, and wrong before it"),
        (gradients(0, 3), "outside the stack", "2 of 6 gradients differ"),
        ([Key(0, "weight", NAMES[4])], "block 3 of model.layers, on pipeline rank 0, stage 3", "The optimizer, the"),
        ([Key(0, "buffer", "model.layers.2.mean")], "block 2 of model.layers, on pipeline rank 1", "Only buffers"),
        ([Key(0, "log", "accuracy (batch 0)")], "computed by the step", "Only logged values differ"),
        ([Key(1, "loss", "batch 1")], "computed by the step", "Optimizer step 1 is the first that differs"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)  # fmt: skip
def test_the_first_difference_has_a_place_and_a_cause(changed: list[Key], where: str, cause: str) -> None:
    found = verdict(*changed)
    assert (found.outcome, found.exit_code) == ("differs", 1)
    assert where in found.cause and cause in found.cause, found.cause
    assert changed[0].name in found.summary and "2, expected 1" in found.summary


def test_gradients_that_all_differ_by_other_factors_have_no_factor() -> None:
    found = verdict(*gradients(0, 1, 2, 3, 4, 5), factor=0)
    assert "All gradients differ" in found.cause and "times what" not in found.cause


def test_attributes_that_blocks_set_are_named() -> None:
    found = verdict(Key(0, "loss", "batch 0"), changed_attributes=("model.layers.0.aux", "model.layers.1.aux", "seen"))
    assert "Blocks set model.layers.*.aux in their forward" in found.cause


def test_attributes_that_the_step_sets_are_named() -> None:
    found = verdict(Key(0, "loss", "batch 0"), changed_attributes=("previous",))
    assert "The step changes previous" in found.cause


def test_random_numbers_are_a_cause_in_a_cube_only() -> None:
    cube = Place("model.layers", STAGES, has_cube=True)
    assert "random numbers" in verdict(Key(0, "loss", "batch 0"), place=cube, draws_numbers=True).cause
    assert "random numbers" not in verdict(Key(0, "loss", "batch 0"), draws_numbers=True).cause


def test_a_step_that_sees_a_share_of_the_samples_is_a_cause() -> None:
    cube = Place("model.layers", STAGES, has_cube=True, shares_samples=True)
    assert "use cube_outside='replicate'" in verdict(Key(0, "loss", "batch 0"), place=cube).cause


def test_a_parameter_in_a_cube_is_sharded() -> None:
    cube = Place("model.layers", STAGES, has_cube=True)
    assert "stage 1, sharded over the cube" in verdict(*gradients(2), place=cube).cause


def test_a_data_rank_that_differs_is_the_cause() -> None:
    expected = values()
    other = expected | dict.fromkeys(gradients(0), 2 * ONES)
    compared = compare(expected, [expected, other], EXACT, NAMES)
    found = verdict_of_layout(compared, PLACE, RankResult(expected, forward_order=NAMES), ())
    assert "Data rank 1 has another value" in found.cause


REFUSAL = RankFailure(1, "UnsupportedError", "a block has hooks", is_refusal=True)
CONSEQUENCE = RankFailure(0, "PeerFailed", "rank 1: a block has hooks", is_consequence=True)
CRASH = RankFailure(2, "RuntimeError", "boom", trace="Traceback of boom")


def test_a_refusal_is_shown_as_it_is() -> None:
    found = verdict_of_failure([CONSEQUENCE, REFUSAL])
    assert (found.outcome, found.summary, found.exit_code) == ("refused", "refused: a block has hooks", 1)


def test_the_cause_of_a_failure_is_shown_and_not_its_consequences() -> None:
    died = RankFailure(3, "died", "the process ended with exit code 1")
    late = RankFailure(4, "timed out", "no answer within 600 s")
    found = verdict_of_failure([CONSEQUENCE, died, late, CRASH])
    assert found.outcome == "failed" and found.summary.endswith("rank 2: RuntimeError: boom")
    assert found.trace == "Traceback of boom"


def cut(kind: str, factor: float) -> Comparison:
    """Micro-batches, compared with whole batches: all values of a kind are multiplied."""
    expected = values()
    actual = {key: value * (factor if key.kind == kind else 1.0) for key, value in expected.items()}
    return compare(expected, [actual], EXACT, NAMES)


def test_a_loss_weight_that_makes_it_exact_is_recommended() -> None:
    options = {"tokens": cut("loss", 1.0), "sum": cut("loss", 4.0)}
    found = verdict_of_microbatches(verdict(), cut("loss", 1.12), options, ())
    assert found.outcome == "depends on micro-batches" and found.exit_code == 1
    assert found.summary == "micro-batches change your loss by 12 %: loss_weight='tokens' makes it exact"
    assert "Set HanayoStrategy(loss_weight='tokens')." in found.cause


def test_batch_norm_is_named_where_no_loss_weight_helps() -> None:
    options: dict[str, Comparison | str] = {"tokens": "the batch has no labels", "sum": cut("loss", 4.0)}
    found = verdict_of_microbatches(verdict(), cut("loss", 1.12), options, ("model.norm",))
    assert found.summary.endswith("by 12 %, and no loss_weight by name makes it exact")
    assert "BatchNorm takes its statistics over each micro-batch: model.norm." in found.cause


def test_a_logged_value_that_micro_batches_change_is_named() -> None:
    found = verdict_of_microbatches(verdict(), cut("log", 2.0), {}, ())
    assert found.summary == "micro-batches change the logged accuracy (batch 0) by 100 %"
    assert "The training is that of whole batches" in found.cause


def shown(verdict: Verdict) -> str:
    output = StringIO()
    print_verdict(verdict, Console(file=output, width=200))
    return output.getvalue()


def test_a_screen_shows_figures_differences_and_the_cause() -> None:
    text = shown(verdict(*gradients(0, 1, 2, 3, 4, 5), Key(0, "loss", "batch 0")))
    assert text.splitlines()[0].startswith("the layout differs, first in the loss of batch 0")
    for part in (
        "gradients",
        "1e+00",
        "the gradient of head in step 0" not in text and "and 2 more",
        "The forward itself",
    ):
        assert isinstance(part, str) and part in text


def test_a_screen_shows_what_each_option_gives() -> None:
    options: dict[str, Comparison | str] = {"tokens": cut("loss", 1.0), "samples": "no samples", "sum": cut("log", 2.0)}
    text = shown(verdict_of_microbatches(verdict(), cut("loss", 1.5), options, ()))
    for part in ("loss_weight='tokens': exact", "loss_weight='samples': no samples", "(the training is exact)"):
        assert part in text


def test_a_note_ends_with_one_full_stop() -> None:
    text = shown(Verdict("exact", "the layout is exact", notes=("one.", "two")))
    assert "Note: one.\n" in text and "Note: two.\n" in text


def test_json_has_everything_and_no_infinite_number() -> None:
    expected = values()
    missing = {key: value for key, value in expected.items() if key.kind != "weight"}
    compared = compare(expected, [missing], EXACT, NAMES)
    assert compared.gap == inf
    found = verdict_of_layout(compared, PLACE, RankResult(expected, forward_order=NAMES), ("a note",))
    parsed = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert parsed["outcome"] == "differs" and parsed["exit_code"] == 1 and parsed["notes"] == ["a note"]
    assert len(parsed["layout"]["differences"]) == 12 and parsed["layout"]["largest"]["weight"] is None
    assert parsed["layout"]["differences"][0]["name"] == "embedding"

"""The verdict names what differs first, and where it belongs."""

import json
from io import StringIO
from math import inf
from typing import Any

import pytest
import torch
from rich.console import Console

from lightning_hanayo.checking.case import RankFailure, RankResult
from lightning_hanayo.checking.comparison import EXACT, Comparison, Key, Values, compare
from lightning_hanayo.checking.examine import (
    Verdict,
    as_json,
    print_verdict,
    summary_of_microbatches,
    verdict_of_failure,
    verdict_of_layout,
)

# Four blocks, one per stage, in a wave over two ranks.
STAGES = tuple((range(i, i + 1), rank) for i, rank in enumerate([0, 1, 1, 0]))
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


def on_layout(compared: Comparison, *, has_cube: bool = False, notes: tuple[str, ...] = ()) -> Verdict:
    rank = RankResult({}, "model.layers", STAGES, tuple(f"model.layers.{i}" for i in range(4)))
    return verdict_of_layout(compared, rank, has_cube=has_cube, notes=notes)


def verdict(*changed: Any, has_cube: bool = False) -> Verdict:
    """The verdict if the values of these keys are doubled."""
    expected = values()
    actual = expected | {key: 2 * expected[key] for key in changed}
    return on_layout(compare(expected, [actual], EXACT), has_cube=has_cube)


def gradients(*indices: int, step: int = 0) -> list[Key]:
    return [Key(step, "gradient", NAMES[i]) for i in indices]


def test_equal_values_are_exact() -> None:
    assert verdict().outcome == "exact"
    assert verdict().summary == "the layout is exact (largest difference 0e+00)"
    assert verdict().exit_code == 0


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ([Key(0, "loss", "batch 0")], "computed by the step on pipeline rank 0"),
        (gradients(0, 5), "outside the stack model.layers, on pipeline rank 0"),
        (gradients(2, 3), "block 1 of model.layers, on pipeline rank 1, stage 1"),
        ([Key(0, "weight", NAMES[4])], "block 3 of model.layers, on pipeline rank 0, stage 3"),
        ([Key(0, "buffer", "model.layers.2.mean")], "block 2 of model.layers, on pipeline rank 1"),
        ([Key(0, "log", "accuracy (batch 0)")], "computed by the step"),
        ([Key(1, "loss", "batch 1")], "computed by the step"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else None,
)
def test_the_first_difference_has_a_place(changed: list[Key], where: str) -> None:
    found = verdict(*changed)
    assert (found.outcome, found.exit_code) == ("differs", 1)
    assert where in found.detail
    assert changed[0].name in found.summary and "2, expected 1" in found.summary


def test_a_parameter_in_a_cube_is_sharded() -> None:
    assert "stage 1, sharded over the cube" in verdict(*gradients(2), has_cube=True).detail


def test_a_data_rank_that_differs_is_named() -> None:
    expected = values()
    other = expected | dict.fromkeys(gradients(0), 2 * ONES)
    found = on_layout(compare(expected, [expected, other], EXACT))
    assert "Data rank 1 has another value" in found.detail


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
    return compare(expected, [actual], EXACT)


def test_what_micro_batches_change_is_named() -> None:
    assert summary_of_microbatches(cut("loss", 1.12)) == "micro-batches change your loss by 12 %"
    assert summary_of_microbatches(cut("weight", 1.5)) == "micro-batches change your weights by 50 %"
    assert summary_of_microbatches(cut("log", 2.0)) == "micro-batches change the logged accuracy (batch 0) by 100 %"


def shown(verdict: Verdict) -> str:
    output = StringIO()
    print_verdict(verdict, Console(file=output, width=200))
    return output.getvalue()


def test_a_screen_shows_figures_and_differences() -> None:
    text = shown(verdict(*gradients(0, 1, 2, 3, 4, 5), Key(0, "loss", "batch 0")))
    assert text.splitlines()[0].startswith("the layout differs, first in the loss of batch 0")
    for part in (
        "gradients",
        "1e+00",
        "the gradient of head in step 0" not in text and "and 2 more",
        "It is computed by the step",
    ):
        assert isinstance(part, str) and part in text


def test_a_note_ends_with_one_full_stop() -> None:
    text = shown(Verdict("exact", "the layout is exact", notes=("one.", "two")))
    assert "Note: one.\n" in text and "Note: two.\n" in text


def test_json_has_everything_and_no_infinite_number() -> None:
    expected = values()
    missing = {key: value for key, value in expected.items() if key.kind != "weight"}
    compared = compare(expected, [missing], EXACT)
    assert compared.gap == inf
    found = on_layout(compared, notes=("a note",))
    parsed = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert parsed["outcome"] == "differs" and parsed["exit_code"] == 1 and parsed["notes"] == ["a note"]
    assert len(parsed["layout"]["differences"]) == 12 and parsed["layout"]["largest"]["weight"] is None
    assert parsed["layout"]["differences"][0]["name"] == "embedding"

"""The zoo: its page has what its runs have written, and a model of each kind trains in it."""

import pytest

from recipes.paper.page import blocks_in
from recipes.zoo import models, page, trial
from tests.harness.limits import real_seconds
from tests.harness.thorough import covered

ONE_OF_EACH = {
    "causal-lm": ("llama", "LlamaForCausalLM"),
    "masked": ("bert", "BertForMaskedLM"),
    "encoder-decoder": ("t5", "T5ForConditionalGeneration"),
    "image-classification": ("vit", "ViTForImageClassification"),
    "image-text-images": ("qwen2_vl", "Qwen2VLForConditionalGeneration"),
}


def test_the_page_is_what_the_runs_have_written() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert blocks_in(text) == page.blocks()


@pytest.mark.parametrize("mapping", covered(ONE_OF_EACH, by=["causal-lm"]))
def test_a_tiny_model_is_exact_on_two_ranks(mapping: str) -> None:
    kind, name = ONE_OF_EACH[mapping]
    assert (kind, name) in models.MAPPINGS[mapping].names()
    row = trial.run(mapping, kind, name, "P=2", real_seconds(60.0))
    assert row["layouts"]["P=2"]["verdict"] == "exact" and row["precision"] == "float64", row
    assert row["layouts"]["P=2"]["gap"] < 1e-9


def test_what_one_process_cannot_train_is_told_apart() -> None:
    row = trial.run("causal-lm", "no_such_model", "LlamaForNothing", "P=2", real_seconds(60.0))
    assert row["layouts"]["P=2"]["verdict"] == "one process can't"

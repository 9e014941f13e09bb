"""Each micro-batch's weight in the mean loss.

labels that count   3 1 0 4     weight   3/8 1/8 0 4/8
"""

from collections import namedtuple
from typing import Any

import pytest
import torch

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.pipeline_parallel.batches.merge import PieceSizes
from lightning_hanayo.strategy.losses import LossWeighting, PieceWeights, for_model
from tests.harness import models

Batch = namedtuple("Batch", "x labels")


def weights(pieces: list[Any], rule: Any, num_data: int = 1) -> PieceWeights:
    return LossWeighting(rule, num_data, group=None).for_training(pieces, sizes_of(pieces))


def sizes_of(pieces: list[Any]) -> PieceSizes:
    return PieceSizes([[len(piece) for piece in pieces]])


def labels(counted: int) -> torch.Tensor:
    return torch.tensor([1] * counted + [-100] * (4 - counted))


COUNTS = [3, 1, 0, 4]
FORMS: list[Any] = [
    lambda n: {"x": torch.ones(4), "labels": labels(n)},
    lambda n: (torch.ones(4), labels(n)),
    lambda n: [torch.ones(4), labels(n)],
    lambda n: Batch(torch.ones(4), labels(n)),
]


@pytest.mark.parametrize("form", FORMS)
def test_tokens(form: Any) -> None:
    found = weights([form(n) for n in COUNTS], "tokens")
    assert found.in_mean == found.in_gradient == (3 / 8, 1 / 8, 0.0, 4 / 8)


def test_labels_that_the_model_shifts() -> None:
    """The first label of each sequence predicts nothing."""
    sequences = [torch.tensor([[1, 2, -100], [-100, 3, 4]]), torch.tensor([[1, -100, 5]])]
    found = weights([{"labels": part} for part in sequences], "shifted_tokens")
    assert found.in_mean == (3 / 4, 1 / 4)
    with pytest.raises(HanayoError, match="loss_weight='shifted_tokens' counts the labels"):
        weights([torch.ones(2)], "shifted_tokens")


def test_causal_models_of_transformers_shift_labels() -> None:
    rules = [for_model("tokens", model()) for model in (models.llama, models.gpt2, models.bert, models.Masked)]
    assert rules == ["shifted_tokens", "shifted_tokens", "tokens", "tokens"]
    assert for_model("samples", models.llama()) == "samples"


def test_a_model_without_the_loss_of_causal_models_does_not() -> None:
    from transformers import BartConfig, BartForCausalLM

    sizes = {"d_model": 4, "decoder_layers": 1, "decoder_attention_heads": 1, "decoder_ffn_dim": 4, "vocab_size": 7}
    assert for_model("tokens", BartForCausalLM(BartConfig(**sizes))) == "tokens"


def test_samples_count_equally_on_every_data_rank() -> None:
    found = weights([torch.ones(n) for n in (3, 3, 2)], "samples", num_data=2)
    assert found.in_mean == (3 / 8, 3 / 8, 2 / 8) and found.in_gradient == (3 / 16, 3 / 16, 2 / 16)


def test_a_function_by_the_user() -> None:
    found = weights([torch.full((1,), v) for v in (1.0, 3.0)], lambda x: x.sum())
    assert found.in_mean == (0.25, 0.75)


def test_evaluation_counts_samples_where_the_rule_does_not_apply() -> None:
    for rule in ("tokens", "sum", lambda piece: piece["labels"].sum()):
        pieces = [torch.ones(3), torch.ones(1)]
        found = LossWeighting(rule, 2, group=None).for_evaluation(pieces, sizes_of(pieces))
        assert found.in_mean == found.in_loss == (3 / 4, 1 / 4)


def test_no_label_counts() -> None:
    assert weights([{"labels": labels(0)}] * 2, "tokens").in_gradient == (0.0, 0.0)


@pytest.mark.parametrize(
    "batch", [{"x": torch.ones(2)}, (torch.ones(2), torch.ones(2)), torch.ones(2), {"labels": [1]}]
)
def test_without_labels(batch: Any) -> None:
    with pytest.raises(HanayoError, match="counts the labels that aren't -100, but the batch has none"):
        weights([batch], "tokens")


def test_sums_count_whole_in_the_loss_and_by_samples_in_means() -> None:
    found = weights([torch.ones(n) for n in (3, 1)], "sum", num_data=2)
    assert (found.in_mean, found.in_loss, found.in_gradient) == ((3 / 4, 1 / 4), (1.0, 1.0), (0.5, 0.5))

"""Each micro-batch's share in the mean loss.

labels that count   3 1 0 4     share   3/8 1/8 0 4/8
"""

from collections import namedtuple
from typing import Any

import pytest
import torch

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy.loss_weight import shares

Batch = namedtuple("Batch", "x labels")


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
    found = shares([form(n) for n in COUNTS], "tokens", num_data=1, group=None)
    assert found.of_mean == found.of_gradient == (3 / 8, 1 / 8, 0.0, 4 / 8)


def test_samples_count_alike_on_every_data_rank() -> None:
    found = shares([torch.ones(n) for n in (3, 3, 2)], "samples", num_data=2, group=None)
    assert found.of_mean == (3 / 8, 3 / 8, 2 / 8) and found.of_gradient == (3 / 16, 3 / 16, 2 / 16)


def test_a_function_of_the_users() -> None:
    found = shares([torch.full((1,), v) for v in (1.0, 3.0)], lambda x: x.sum(), num_data=1, group=None)
    assert found.of_mean == (0.25, 0.75)


def test_nothing_counts() -> None:
    assert shares([{"labels": labels(0)}] * 2, "tokens", num_data=1, group=None).of_gradient == (0.0, 0.0)


@pytest.mark.parametrize(
    "batch", [{"x": torch.ones(2)}, (torch.ones(2), torch.ones(2)), torch.ones(2), {"labels": [1]}]
)
def test_without_labels(batch: Any) -> None:
    with pytest.raises(HanayoError, match="counts the labels that aren't -100, but the batch has none"):
        shares([batch], "tokens", num_data=1, group=None)


def test_sums_count_whole_in_the_loss_and_by_samples_in_means() -> None:
    found = shares([torch.ones(n) for n in (3, 1)], "sum", num_data=2, group=None)
    assert (found.of_mean, found.of_loss, found.of_gradient) == ((3 / 4, 1 / 4), (1.0, 1.0), (0.5, 0.5))

"""Weights of micro-batches, compared with what their losses were means of.

labels that count   3 1 0 4     right: 3/8 1/8 0 4/8     a warning: 1/4 1/4 1/4 1/4
"""

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_hanayo.pipeline_parallel.batches.microbatches import PieceSizes
from lightning_hanayo.strategy.losses.loss_watch import LossWatch
from lightning_hanayo.strategy.losses.loss_weight import LossWeighting

CLASSES = 5
LENGTH = 4


class Loss(nn.Module):
    """Of scores [batch, seq, classes] and labels [batch, seq]."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head = nn.Linear(CLASSES, CLASSES)
        self.criterion = nn.CrossEntropyLoss(**options)

    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        return self.criterion(self.head(piece["x"]).flatten(0, 1), piece["labels"].flatten())


class Shifted(Loss):
    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        scores = self.head(piece["x"])[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1), piece["labels"][:, 1:].flatten())


class SummedByHand(Loss):
    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        return self.head(piece["x"]).square().sum()


class Penalised(Loss):
    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        return super().forward(piece) + self.head.weight.square().sum()


class MeanOfClasses(Loss):
    """A mean of means, of which each is over the samples."""

    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        return self.head(piece["x"]).mean((0, 1)).sum()


class Balances(Loss):
    """The loss of experts' routers: how often each is chosen, times its mean probability."""

    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        scores = self.head(piece["x"]).flatten(0, 1).softmax(-1)
        chosen = functional.one_hot(scores.argmax(-1), CLASSES).float().mean(0)
        return (chosen * scores.mean(0)).sum()


class Prompts(Loss):
    """Compares samples with classes, which a layer has made of no samples."""

    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        scores = self.head(piece["x"])[:, 0] @ self.head(torch.eye(CLASSES)[:4]).T
        return scores.logsumexp(1).mean()


class OneBySeveral(Loss):
    """A loss for each sample, whose labels that count are not equally many, and their mean."""

    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        rows = [{name: value[i : i + 1] for name, value in piece.items()} for i in range(len(piece["x"]))]
        return torch.stack([super(OneBySeveral, self).forward(row) for row in rows]).mean()


class RootOfEach(Loss):
    """The mean of the samples' root mean squares."""

    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        return self.head(piece["x"]).square().mean((1, 2)).sqrt().mean()


class SumOverNumber(Loss):
    """As `kl_div(reduction="batchmean")`."""

    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        return self.head(piece["x"]).square().sum() / len(piece["x"])


class Fused(Loss):
    """A loss that autograd sees as one function."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor) -> Tensor:
            return loss * 1.0

    def forward(self, piece: dict[str, Tensor]) -> Tensor:
        return self.Function.apply(super().forward(piece))


def piece(*counted: int) -> dict[str, Tensor]:
    """A micro-batch: how many labels of each sample count."""
    labels = torch.stack([torch.tensor([1] * n + [-100] * (LENGTH - n)) for n in counted])
    return {"x": torch.randn(len(counted), LENGTH, CLASSES), "labels": labels}


def said(module: nn.Module, pieces: Sequence[dict[str, Tensor]], rule: Any, watch: LossWatch | None = None) -> str:
    """What a watch says of a batch that is weighed by the rule."""
    sizes = PieceSizes([[len(one["x"]) for one in pieces]])
    watch = watch or watch_of(module, rule)
    weights = LossWeighting(rule, 1, None).for_training(pieces, sizes).in_loss
    for m, one in enumerate(pieces):
        watch.note(sizes.parts[0], m, module(one), ())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watch.compare(pieces, sizes, [watch.noted(m) for m in range(len(pieces))], weights)
    return "".join(str(one.message) for one in caught)


def watch_of(module: nn.Module, rule: Any) -> LossWatch:
    return LossWatch(module, rule, batch_dim=0, warns=True, shares_samples=False)


def test_after_the_first_batches_few_are_read() -> None:
    module, watch = Loss(), watch_of(Loss(), "samples")
    read = []
    for number in range(1, 200):
        with watch.training([2]):
            watch.note([2], 0, module(piece(4, 3)), ())
        read += [number] if watch.noted(0) is not None else []
    assert read == [*range(1, 17), 64, 128, 192]


UNEVEN = [piece(4, 3), piece(2, 1), piece(4)]
FULL = [piece(4, 4), piece(4, 4), piece(4)]


@pytest.mark.parametrize(
    ("module", "rule", "way_out"),
    [
        (Loss(), "samples", "Set HanayoStrategy(loss_weight='tokens')."),
        (Loss(), "shifted_tokens", "Set HanayoStrategy(loss_weight='tokens')."),
        (Shifted(), "tokens", "Set HanayoStrategy(loss_weight='shifted_tokens')."),
        (Loss(reduction="sum"), "samples", "Set HanayoStrategy(loss_weight='sum')."),
        (SummedByHand(), "samples", "Set HanayoStrategy(loss_weight='sum')."),
        (Loss(weight=torch.arange(1.0, 6.0)), "samples", "Set HanayoStrategy(loss_weight='tokens')."),
        (Penalised(reduction="sum"), "sum", "let all be means over the same"),
        (Fused(), "samples", "if over labels, set HanayoStrategy(loss_weight='tokens')."),
    ],
)
def test_the_option_that_mends_a_loss_is_named(module: nn.Module, rule: Any, way_out: str) -> None:
    assert way_out in said(module, UNEVEN, rule)


@pytest.mark.parametrize(
    ("module", "pieces", "rule"),
    [
        (Loss(), UNEVEN, "tokens"),
        (Shifted(), UNEVEN, "shifted_tokens"),
        (Loss(reduction="sum"), UNEVEN, "sum"),
        (SummedByHand(), UNEVEN, "sum"),
        (Penalised(), UNEVEN, "tokens"),
        (Loss(label_smoothing=0.1), UNEVEN, "tokens"),
        (Loss(label_smoothing=0.1), FULL, "samples"),
        (Loss(), FULL, "samples"),
        (Shifted(), FULL, "samples"),
        (MeanOfClasses(), FULL, "samples"),
        (Prompts(), [piece(4, 4), piece(4, 4)], "samples"),
        (RootOfEach(), [piece(4), piece(4)], "samples"),
        (OneBySeveral(), UNEVEN, "samples"),
        (SumOverNumber(), [piece(4), piece(4)], "samples"),
        (Loss(), [piece(4, 4)], "samples"),
        (Fused(), FULL, "samples"),
        (Fused(), UNEVEN, "tokens"),
    ],
)
def test_right_weights_are_not_warned_of(module: nn.Module, pieces: list[dict[str, Tensor]], rule: Any) -> None:
    assert said(module, pieces, rule) == ""


def test_a_product_of_means_is_named() -> None:
    assert "a product of means or sums over samples" in said(Balances(), FULL, "samples")


def test_sums_are_named() -> None:
    assert "cross_entropy (criterion) is a sum over samples" in said(Loss(reduction="sum"), UNEVEN, "samples")


def test_padding_in_a_later_batch_is_seen_and_warned_of_once() -> None:
    module, watch = Loss(), watch_of(Loss(), "samples")
    found = [said(module, pieces, "samples", watch) for pieces in (FULL, UNEVEN, UNEVEN)]
    assert [bool(text) for text in found] == [False, True, False]

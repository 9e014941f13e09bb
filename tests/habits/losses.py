"""Habits: losses that micro-batches change unless they are weighed right, or whatever their weights are."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import get_world_size
from torch.nn import functional

from tests.habits.batches import ShiftedLabels, with_labels
from tests.habits.habit import EXACT, Habit, PerMicrobatch, Refused, everywhere, on
from tests.harness import models
from tests.harness.models import CLASSES, IGNORED, MLP, WIDTH, Batch

FP32_LOSSES = 1e-6
"""causal models of transformers compute their loss in fp32"""
LLAMA = partial(models.llama, kv_heads=2)
EVEN = partial(models.vectors, (8, 8, 8), torch.float64)
VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 4.0, 1.5], dtype=torch.float64)
BATCH_NORM = Refused("is a BatchNorm1d, which normalises by the mean of a batch")


def padded() -> list[Batch]:
    """Token batches as collators of causal models make them: labels are the tokens, and -100 where they are padded."""
    batches = models.padded((8, 8, 8))
    for batch in batches:
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
    return batches


class Ignores(models.Trained):
    """A mean over the labels that aren't -100."""

    def __init__(self) -> None:
        super().__init__()
        self.body = MLP()

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self.body(batch["x"]).flatten(0, 1), batch["labels"].flatten())


class MasksByHand(Ignores):
    def loss(self, batch: Batch) -> Tensor:
        labels = batch["labels"].flatten()
        mask = (labels != IGNORED).double()
        losses = functional.cross_entropy(self.body(batch["x"]).flatten(0, 1), labels, reduction="none")
        return (losses * mask).sum() / mask.sum()


class WeighsClasses(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone())

    def loss(self, batch: Batch) -> Tensor:
        return self.criterion(self(batch["x"]), batch["y"])


def sum_of_weights(batch: Batch) -> float:
    return float(CLASS_WEIGHTS[batch["y"]].sum())


class Sums(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(reduction="sum")

    def loss(self, batch: Batch) -> Tensor:
        return self.criterion(self(batch["x"]), batch["y"])


class SumsByHand(MLP):
    def loss(self, batch: Batch) -> Tensor:
        return (self(batch["x"]) - functional.one_hot(batch["y"], CLASSES)).square().sum()


class Contrasts(MLP):
    """In-batch negatives: each sample is to be near its own input, and far from the others'."""

    def loss(self, batch: Batch) -> Tensor:
        a = functional.normalize(self.head(self(batch["x"])), dim=1)
        b = functional.normalize(self.embedding(batch["x"])[:, :CLASSES], dim=1)
        return functional.cross_entropy(a @ b.T / 0.1, torch.arange(len(a)))

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x


class RootOfMean(MLP):
    def loss(self, batch: Batch) -> Tensor:
        return functional.mse_loss(self(batch["x"]), functional.one_hot(batch["y"], CLASSES).double()).sqrt()


class Dice(MLP):
    def loss(self, batch: Batch) -> Tensor:
        scores, wanted = self(batch["x"]).softmax(1), functional.one_hot(batch["y"], CLASSES)
        return 1 - 2 * (scores * wanted).sum() / (scores.sum() + wanted.sum())


class Mixup(MLP):
    """Mixes each sample with the one before it."""

    def loss(self, batch: Batch) -> Tensor:
        scores = self(0.7 * batch["x"] + 0.3 * batch["x"].roll(1, 0))
        mixed = [functional.cross_entropy(scores, y) for y in (batch["y"], batch["y"].roll(1, 0))]
        return 0.7 * mixed[0] + 0.3 * mixed[1]


class MixesByRandperm(MLP):
    """Mixes each sample with a random one; a generator of its own keeps the numbers the same on all layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.random = torch.Generator()

    def loss(self, batch: Batch) -> Tensor:
        order = torch.randperm(len(batch["y"]), generator=self.random.manual_seed(3))
        scores = self(0.7 * batch["x"] + 0.3 * batch["x"][order])
        return 0.7 * functional.cross_entropy(scores, batch["y"]) + 0.3 * functional.cross_entropy(
            scores, batch["y"][order]
        )


class WarmsUp(MLP):
    """A counter that the step advances, for a loss that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def loss(self, batch: Batch) -> Tensor:
        self.calls += 1
        growth = min(1.0, self.calls / 20)
        return growth * super().loss(batch)


class BlockWithBatchNorm(models.Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)


class NormalisesInBlocks(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BlockWithBatchNorm() for _ in range(models.NUM_BLOCKS))


class FreezesStatistics(NormalisesInBlocks):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.eval()


class ScalesRate(MLP):
    def configure_optimizers(self) -> Any:
        size = getattr(self.trainer.strategy, "data_parallel_size", self.trainer.world_size)
        return torch.optim.SGD(self.parameters(), lr=0.1 * size)


class ScalesRateByWorld(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.world_size)


class ScalesRateByDevices(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * self.trainer.num_devices * self.trainer.num_nodes)


class ScalesRateByGroup(MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1 * get_world_size())


HABITS = [
    Habit("GPT-2 of `transformers`, padded, with `loss_weight='tokens'`", models.gpt2, padded, everywhere(EXACT), True,
          strategy={"loss_weight": "tokens"}, tolerance=FP32_LOSSES),
    Habit("Llama of `transformers`, padded, with `loss_weight='tokens'`", LLAMA, padded, everywhere(EXACT), True,
          strategy={"loss_weight": "tokens"}, tolerance=FP32_LOSSES),
    Habit("the same with the default, `loss_weight='samples'`", LLAMA, padded,
          everywhere(EXACT), tolerance=FP32_LOSSES),
    Habit("labels shifted in the step, without `loss_weight='shifted_tokens'`", ShiftedLabels, with_labels,
          everywhere(EXACT)),
    Habit("padded labels, with `loss_weight='tokens'`", Ignores, with_labels, everywhere(EXACT), True,
          strategy={"loss_weight": "tokens"}),
    Habit("padded labels, without it", Ignores, with_labels,
          everywhere(EXACT)),
    Habit("`(losses * mask).sum() / mask.sum()`, with `loss_weight='tokens'`", MasksByHand, with_labels,
          everywhere(EXACT), True, strategy={"loss_weight": "tokens"}),
    Habit("`(losses * mask).sum() / mask.sum()`, without it", MasksByHand, with_labels,
          everywhere(EXACT)),
    Habit("class weights, with a function as `loss_weight`", WeighsClasses, VECTORS, everywhere(EXACT), True,
          strategy={"loss_weight": sum_of_weights}),
    Habit("class weights, without it", WeighsClasses, VECTORS, everywhere(EXACT)),
    Habit("`CrossEntropyLoss(reduction='sum')`, with `loss_weight='sum'`", Sums, VECTORS, everywhere(EXACT), True,
          strategy={"loss_weight": "sum"}),
    Habit("`CrossEntropyLoss(reduction='sum')`, without it", Sums, VECTORS,
          everywhere(EXACT)),
    Habit("a sum by hand, without it", SumsByHand, VECTORS, everywhere(EXACT)),
    Habit("in-batch negatives", Contrasts, EVEN, everywhere(EXACT)),
    Habit("the root of a mean squared error", RootOfMean, EVEN, everywhere(EXACT)),
    Habit("a Dice loss over the batch", Dice, EVEN, everywhere(EXACT)),
    Habit("mixup by `roll`", Mixup, EVEN, everywhere(EXACT)),
    Habit("mixup by `randperm`", MixesByRandperm, EVEN, everywhere(EXACT)),
    Habit("a number that the step counts up, for a warm-up", WarmsUp, VECTORS,
          everywhere(EXACT)),
    Habit("BatchNorm in the blocks", NormalisesInBlocks, EVEN,
          on(pipelines=PerMicrobatch(r"blocks.0.norm \(BatchNorm1d\).* will normalise by the mean of each"),
             cubes=BATCH_NORM)),
    Habit("BatchNorm in the blocks, in eval mode", FreezesStatistics, VECTORS, everywhere(EXACT)),
    Habit("BatchNorm with a micro-batch of a single sample", NormalisesInBlocks, VECTORS,
          on(pipelines=Refused("norm normalises by the mean of a micro-batch, which has a single sample"),
             cubes=BATCH_NORM)),
    Habit("a learning rate scaled by `trainer.strategy.data_parallel_size`", ScalesRate, VECTORS, everywhere(EXACT),
          True),
    Habit("a learning rate scaled by `trainer.world_size`", ScalesRateByWorld, VECTORS,
          everywhere(Refused("configure_optimizers reads trainer.world_size"))),
    Habit("a learning rate scaled by `trainer.num_devices`", ScalesRateByDevices, VECTORS,
          everywhere(Refused("configure_optimizers reads trainer.world_size, num_devices"))),
    Habit("a learning rate scaled by `torch.distributed.get_world_size()`", ScalesRateByGroup, VECTORS,
          everywhere(Refused(r"num_devices or torch.distributed.get_world_size\(\)",
                             "num_devices or torch.distributed.get_world_size()"))),
]  # fmt: skip

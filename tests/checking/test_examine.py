"""A check of real modules on real ranks: exact, dependent on micro-batches, refused, or different by name."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning import LightningModule
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn import functional

from lightning_hanayo.pipeline_parallel.p2p import gradient_message
from lightning_hanayo.strategy.losses import PieceWeights
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.session import Session
from lightning_hanayo.tensor_parallel.outside_parameters import OutsideParameters
from tests.checking.verdicts import verdict_of
from tests.habits.losses import WeighsClasses
from tests.harness import models
from tests.harness.models import NUM_BLOCKS, WIDTH, Batch
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout

WAVE = Layout(2, 1, 1)
DATA = Layout(2, 1, 2)
CUBE = Layout(1, 1, 1, cube=(1, 2, 1))
BOTH = Layout(2, 1, 1, cube=(1, 2, 1))
VECTORS = models.vectors((8, 8, 6, 8))


class DroppingBlock(models.Block):
    """Draws in a module, and in a function with a probability of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.drop_rate = nn.Dropout(0.2), 0.1

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(self.dropout(x)), self.drop_rate, self.training)


class Dropping(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(NUM_BLOCKS))


class DroppingTwice(Dropping):
    """Compares two passes with other masks; the first one has no gradients."""

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = self(batch["x"])
        return (self(batch["x"]) - target).square().mean()


class Noisy(models.MLP):
    """Draws what no probability switches off."""

    def loss(self, batch: Batch) -> Tensor:
        return super().loss({**batch, "x": batch["x"] + 0.1 * torch.randn_like(batch["x"])})


class BuiltLater(models.Trained):
    """Its model is built in `configure_model`, where its Trainer's strategy says so on the meta device."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net: Any = models.MLP()

    def loss(self, batch: Batch) -> Tensor:
        return self.net.loss(batch)


class ConfiguredLater(models.MLP):
    """Builds its layers in `configure_model`, on the meta device."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.blocks: Any = None

    def configure_model(self) -> None:
        if self.blocks is None:
            with torch.device("meta"):
                self.embedding = nn.Linear(WIDTH, WIDTH)
                self.blocks = nn.ModuleList(models.Block() for _ in range(NUM_BLOCKS))
                self.head = nn.Linear(WIDTH, models.CLASSES)


class Normalized(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Manual(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


EXACT: dict[str, tuple[Callable[[], LightningModule], list[Any], Layout, dict[str, Any]]] = {
    "a pipeline": (models.MLP, VECTORS, WAVE, {}),
    "data ranks that accumulate and clip": (models.MLP, VECTORS * 2, DATA, {"accumulate": 2, "clip": 0.1}),
    "a sharded optimizer, whose gradients are gathered for the check": (
        models.MLP,
        VECTORS * 2,
        DATA,
        {"clip": 0.1, "accumulate": 2, "shard_optimizer": True, "recompute": "blocks"},
    ),
    "a cube": (models.SharesOutside, VECTORS, CUBE, {}),
    "both": (models.MLP, VECTORS, BOTH, {}),
    "dropout in a pipeline": (Dropping, VECTORS, DATA, {}),
    "dropout in a cube": (Dropping, VECTORS, CUBE, {}),
    "dropout in two passes": (DroppingTwice, VECTORS, DATA, {}),
    "dropout in two passes in a cube": (DroppingTwice, VECTORS, CUBE, {}),
    "noise in a pipeline": (Noisy, VECTORS, WAVE, {}),
    "metrics and an epoch's means": (models.Metrics, VECTORS, DATA, {}),
    "tokens": (models.Masked, models.padded((8, 8, 6, 8)), DATA, {"loss_weight": "tokens"}),
    "tokens in a cube": (models.Masked, models.padded((8, 8, 6, 8)), CUBE, {}),
    "a model of transformers, which rounds": (models.gpt2, models.texts((8, 8)), WAVE, {"loss_weight": "tokens"}),
    "configure_model on the meta device": (ConfiguredLater, VECTORS, WAVE, {}),
}
DEFAULT = [
    "dropout in two passes",
    "configure_model on the meta device",
]


@pytest.mark.parametrize("name", covered(EXACT, by=DEFAULT))
def test_a_training_that_is_exact(pool: Pool, name: str) -> None:
    factory, batches, layout, options = EXACT[name]
    verdict = verdict_of(pool, factory, batches, layout, **options)
    assert verdict.outcome == "exact", f"{verdict.summary} {verdict.detail} {verdict.trace}"
    assert verdict.layout is not None and verdict.layout.num_values["gradient"] > 50


DEPENDING: dict[str, tuple[Callable[[], LightningModule], list[Any]]] = {
    "a mean over tokens": (models.Masked, models.padded((8, 8))),
    "a sum over samples": (models.Summed, VECTORS),
    "batch norm": (Normalized, VECTORS),
}


@pytest.mark.parametrize("name", covered(DEPENDING, by=["a mean over tokens"]))
def test_a_loss_that_does_not_survive_being_cut(pool: Pool, name: str) -> None:
    verdict = verdict_of(pool, *DEPENDING[name], WAVE, step="microbatch")
    assert (verdict.outcome, verdict.exit_code) == ("depends on micro-batches", 1)
    assert verdict.summary.startswith("micro-batches change your loss by ")
    assert verdict.layout is not None and verdict.layout.is_exact


class NormalizedBlocks(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(WIDTH)


class NormalizedTwice(NormalizedBlocks, Normalized):
    """Outside the blocks a layer normalises by the whole batch, inside by a micro-batch: no one process does both."""


@pytest.mark.parametrize("factory", covered((NormalizedBlocks, NormalizedTwice), by=[NormalizedTwice]))
def test_what_no_probe_can_mend_depends_on_micro_batches(pool: Pool, factory: Callable[[], LightningModule]) -> None:
    """Blocks get micro-batches in any case."""
    verdict = verdict_of(pool, factory, VECTORS, WAVE, steps=1)
    assert (verdict.outcome, verdict.exit_code) == ("depends on micro-batches", 1), verdict.detail
    assert verdict.layout is not None and verdict.layout.is_exact


class ShrinkingBlock(models.Block):
    """Sets a number once, in the first micro-batch, as Swin fits its windows to the images."""

    window = WIDTH

    def forward(self, x: Tensor) -> Tensor:
        self.window = min(self.window, WIDTH // 2)
        return super().forward(x) * self.window


class Shrinking(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ShrinkingBlock() for _ in range(NUM_BLOCKS))


def test_what_only_the_first_micro_batch_sets_is_the_whole_batchs(pool: Pool) -> None:
    verdict = verdict_of(pool, Shrinking, VECTORS, WAVE, steps=1)
    assert verdict.outcome == "exact", f"{verdict.summary} {verdict.trace}"


class StoringBlock(models.Block):
    """Stores what a router's auxiliary loss is: no mean over samples."""

    def forward(self, x: Tensor) -> Tensor:
        self.penalty = x.mean(0).square().sum()
        return super().forward(x)


class Storing(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StoringBlock() for _ in range(NUM_BLOCKS))

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + sum(block.penalty for block in self.blocks)


def test_an_auxiliary_loss_of_blocks_depends_on_micro_batches_and_the_summary_says_so(pool: Pool) -> None:
    verdict = verdict_of(pool, Storing, VECTORS, WAVE, steps=1)
    assert verdict.outcome == "depends on micro-batches"
    assert verdict.summary.startswith("micro-batches change your loss by ")
    assert "blocks return or store a tensor of the shape () for each micro-batch" in verdict.summary
    assert verdict.layout is not None and verdict.layout.is_exact, "pipeline and cube are right"
    assert verdict.microbatches is not None and not verdict.microbatches.is_exact
    assert verdict_of(pool, Storing, VECTORS, WAVE, doubled_gradients, steps=1).outcome == "differs"


def test_class_weights_are_exact_by_default(pool: Pool) -> None:
    """No rule that can be read off the batch counts them, so the step runs once."""
    verdict = verdict_of(pool, WeighsClasses, VECTORS, WAVE, steps=1)
    assert (verdict.outcome, verdict.exit_code) == ("exact", 0)


def test_a_refusal_is_the_strategys_message(pool: Pool) -> None:
    verdict = verdict_of(pool, Manual, VECTORS, WAVE)
    assert (verdict.outcome, verdict.exit_code) == ("refused", 1)


def test_noise_in_a_cube_is_refused_by_the_line_that_draws_it(pool: Pool) -> None:
    verdict = verdict_of(pool, Noisy, VECTORS, CUBE, steps=1)
    assert (verdict.outcome, verdict.exit_code) == ("refused", 1)
    assert "torch.randn_like(batch" in verdict.summary and "leave the cube out" in verdict.summary


# What is broken on purpose, in the workers.


@contextmanager
def doubled_gradients() -> Iterator[None]:
    """On pipeline ranks above 0."""
    run = Pipeline.run

    def doubling(self: Pipeline, *arguments: Any, **keywords: Any) -> None:
        run(self, *arguments, **keywords)
        for parameter in self.parameters if self.rank > 0 else ():
            if parameter.grad is not None:
                parameter.grad *= 2

    with patch.object(Pipeline, "run", doubling):
        yield


@contextmanager
def lost_gradients() -> Iterator[None]:
    """The last stage sends zeros."""

    def zeros(gradients: list[Tensor | None]) -> Any:
        return gradient_message([None if one is None else torch.zeros_like(one) for one in gradients])

    with patch("lightning_hanayo.pipeline_parallel.stages.gradient_message", zeros):
        yield


@contextmanager
def wrong_weights() -> Iterator[None]:
    """Gradients count half."""
    weigh = Session.weigh

    def halving(self: Session, *arguments: Any, **keywords: Any) -> PieceWeights:
        weights = weigh(self, *arguments, **keywords)
        return PieceWeights(weights.in_mean, weights.in_loss, tuple(weight / 2 for weight in weights.in_gradient))

    with patch.object(Session, "weigh", halving):
        yield


@contextmanager
def tripled_outside() -> Iterator[None]:
    """In a cube: gradients of the parameters outside the stack."""
    reduce_scatter = OutsideParameters.reduce_scatter

    def tripling(self: OutsideParameters) -> None:
        reduce_scatter(self)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad *= 3

    with patch.object(OutsideParameters, "reduce_scatter", tripling):
        yield


BROKEN = {
    "doubled": (doubled_gradients, WAVE, "of blocks, on pipeline rank 1, stage 1"),
    "lost": (lost_gradients, WAVE, "outside the stack blocks, on pipeline rank 0"),
    "outside": (tripled_outside, CUBE, "outside the stack blocks, on pipeline rank 0, sharded over the cube"),
}


@pytest.mark.parametrize("name", covered(BROKEN, by=["doubled", "outside"]))
def test_what_is_broken_is_found(pool: Pool, name: str) -> None:
    break_, layout, where = BROKEN[name]
    verdict = verdict_of(pool, models.MLP, VECTORS, layout, break_)
    assert (verdict.outcome, verdict.exit_code) == ("differs", 1), verdict.summary
    assert where in verdict.detail, verdict.detail
    assert "the gradient of" in verdict.summary


@pytest.mark.thorough
def test_wrong_weights_of_micro_batches_differ_from_whole_batches(pool: Pool) -> None:
    verdict = verdict_of(pool, models.MLP, VECTORS, WAVE, wrong_weights)
    assert (verdict.outcome, verdict.exit_code) == ("depends on micro-batches", 1), verdict.summary
    assert verdict.summary == "micro-batches change your gradients by 50 %"


# What users do that a layout does not reproduce.


class ReadsPrevious(models.MLP):
    """The step reads what it has set for the micro-batch in front."""

    def __init__(self) -> None:
        super().__init__()
        self.previous = 0.0

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss({**batch, "x": batch["x"] * (1 + self.previous)})
        self.previous = float(loss.detach())
        return loss


def test_what_differs_is_named(pool: Pool) -> None:
    verdict = verdict_of(pool, ReadsPrevious, VECTORS, WAVE, step="microbatch")
    assert verdict.outcome == "differs" and "the loss of batch 0 in step 0" in verdict.summary, verdict.summary


def test_all_trainings_start_from_the_folder_of_init_from(pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(9)
    save_model(models.MLP(), str(tmp_path / "model.safetensors"))
    assert verdict_of(pool, BuiltLater, VECTORS, WAVE, init_from=tmp_path).outcome == "exact"

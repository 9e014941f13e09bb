"""Precision plugins of Lightning's give the same gradients as in one process, and loss scales skip the same steps."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, TransformerEnginePrecision
from torch.amp import GradScaler

from lightning_hanayo import HanayoStrategy, check
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.setup.checks import check_quantized_layers
from tests.harness import models
from tests.harness.devices import on_host, trainer_on
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    data_rank,
    make_loader,
    make_trainer,
    merge,
    unguarded,
)


def train(layout: Layout, precision: str) -> Any:
    callback = OutcomeCallback()
    trainer = make_trainer(layout, max_steps=2, precision=precision, gradient_clip_val=0.1, callbacks=[callback])
    batches = [{k: v[data_rank(layout) :: layout.data] for k, v in b.items()} for b in models.vectors((8, 8))]
    trainer.fit(models.build(models.MLP), make_loader(batches))
    return callback.outcome


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16-mixed", 2e-2), ("bf16-true", 4e-2), ("64-true", 1e-12)])
@pytest.mark.parametrize("layout", covered([Layout(2, 1, 1), Layout(2, 1, 2)], by=[Layout(2, 1, 1)]), ids=str)
def test_first_gradients(pool: Pool, layout: Layout, precision: str, tolerance: float) -> None:
    """Within the precision: bf16 has 8 bits, and the sums are cut in another way."""
    (alone,) = pool.run(1, train, Layout(), precision)
    ours = merge(pool.run(layout.world_size, train, layout, precision), layout)
    largest = max(g.abs().max().item() for g in alone.gradients.values())
    for name, expected in alone.gradients.items():
        assert ours.gradients[name].dtype == expected.dtype
        assert (ours.gradients[name] - expected).abs().max().item() <= tolerance * largest, name


# fp16 with a gradient scaler

SCALED = [
    Layout(1, 2, 1),
    Layout(2, 1, 1),
    Layout(2, 2, 1),
    Layout(2, 1, 2),
    Layout(1, 1, 2),
    Layout(2, 1, 1, "hanayo-zb"),
    Layout(2, 1, 1, cube=(1, 2, 1)),
    Layout(cube=(2, 1, 1)),
]
FEW = [Layout(2, 1, 2), Layout(2, 1, 1, "hanayo-zb"), Layout(2, 1, 1, cube=(1, 2, 1))]
STEPS = 7


class Descent(models.MLP):
    """Its steps are in proportion to the gradients, and so are errors of rounding."""

    fused = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, fused=self.fused)


class FusedDescent(Descent):
    """Its optimizer gets the scale, and skips the step itself."""

    fused = True


class InfOnLastRank(OutcomeCallback):
    """Sets a gradient of the last rank to inf in the third batch, and keeps the scale after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scales: list[float] = []

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if len(self.scales) == 2 and trainer.global_rank == trainer.world_size - 1:
            with unguarded(trainer):
                next(p for p in pl_module.parameters() if p.grad is not None).grad.view(-1)[0] = torch.inf

    def on_before_optimizer_step(self, *_: Any) -> None:
        """Keeps no gradients: those of the first step are NaN."""

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        super().on_train_batch_end(trainer, *args)
        plugin = trainer.precision_plugin
        assert isinstance(plugin, MixedPrecision) and plugin.scaler is not None
        self.scales.append(plugin.scaler.get_scale())


def train_scaled(
    layout: Layout | None, model: Any, clip: float | None, accumulate: int, device: str = "cpu"
) -> tuple[Outcome, list[float]]:
    """The scale begins so large that the first gradients overflow, and doubles after two steps without inf."""
    callback = InfOnLastRank()
    scaler = GradScaler(device, init_scale=2.0**30, backoff_factor=2.0**-16, growth_interval=2)
    trainer = trainer_on(
        device,
        layout,
        max_steps=STEPS,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        callbacks=[callback],
        plugins=[MixedPrecision("16-mixed", device, scaler)],
    )
    layout, batches = layout or Layout(), models.vectors((8,) * STEPS * accumulate)
    shares = [{k: v[data_rank(layout) :: layout.data] for k, v in b.items()} for b in batches]
    trainer.fit(models.build(model), make_loader(shares))
    return on_host(callback.outcome), callback.scales


Scaled = tuple[Outcome, list[float]]
"""the outcome of one rank, and the scale after each batch"""


def check_scaled(pool: Pool, layout: Layout, *how: Any) -> None:
    (plain,) = pool.run(1, train_scaled, None, *how)
    assert_same_scales_and_weights(pool.run(layout.world_size, train_scaled, layout, *how), plain, layout)


def assert_same_scales_and_weights(ranks: list[Scaled], plain: Scaled, layout: Layout) -> None:
    alone, scales = plain
    assert [found for _, found in ranks] == [scales] * layout.world_size
    ours = merge([outcome for outcome, _ in ranks], layout)
    assert ours.losses == pytest.approx(alone.losses, rel=1e-2)
    for name, expected in alone.weights.items():
        assert (ours.weights[name] - expected).abs().max() <= 3e-3, name


@pytest.mark.parametrize("layout", covered(SCALED, by=FEW[:1]), ids=str)
def test_an_infinity_on_one_rank_skips_the_step_on_all(pool: Pool, layout: Layout) -> None:
    check_scaled(pool, layout, Descent, None, 1)


WAYS: list[Any] = [(Descent, 0.1, 1), (Descent, None, 3), (FusedDescent, None, 1)]


@pytest.mark.parametrize(
    ("model", "clip", "accumulate", "layout"),
    covered(
        [(model, clip, n, layout) for model, clip, n in WAYS for layout in FEW],
        by=[(*WAYS[1], FEW[1]), (*WAYS[2], FEW[1])],
    ),
    ids=str,
)
def test_scaled_gradients_are_clipped_and_accumulated(
    pool: Pool, model: Any, clip: float | None, accumulate: int, layout: Layout
) -> None:
    check_scaled(pool, layout, model, clip, accumulate)


def resumed(layout: Layout, path: str, epochs: list[int]) -> list[float]:
    """The scales of the last run. Each run starts from the checkpoint of the one before."""
    for index, epoch in enumerate(epochs):
        callback = InfOnLastRank()
        plugin = MixedPrecision("16-mixed", "cpu", GradScaler("cpu", init_scale=2.0**20, growth_interval=3))
        trainer = make_trainer(layout, max_epochs=epoch, callbacks=[callback], plugins=[plugin])
        trainer.fit(models.build(Descent), make_loader(models.vectors((8,) * 4)), ckpt_path=path if index else None)
        trainer.save_checkpoint(path)
    return callback.scales


@pytest.mark.thorough
def test_a_checkpoint_has_the_scale(pool: Pool, tmp_path: Path) -> None:
    """An inf in the third batch of the first run lowers it."""
    path = str(tmp_path / "training.ckpt")
    (*_, last), _ = pool.run(2, resumed, Layout(2), path, [1])
    (begin, *_), _ = pool.run(2, resumed, Layout(2), path, [1, 2])
    assert begin == last < 2.0**20


# fp8


@pytest.mark.parametrize("layout", [Layout(2), Layout(cube=(2, 1, 1)), Layout(data=2)], ids=str)
def test_transformer_engine_is_refused_where_a_model_is_cut(layout: Layout) -> None:
    plugin = TransformerEnginePrecision.__new__(TransformerEnginePrecision)  # its package may be missing
    trainer = make_trainer(layout, plugins=plugin)
    trainer.strategy.connect(models.build(models.MLP))
    if layout.topology.replica_size == 1:
        trainer.strategy._check(trainer)
        return
    with pytest.raises(UnsupportedError, match="precision='transformer-engine' keeps the scales of fp8"):
        trainer.strategy._check(trainer)


def test_layers_of_torchao_train_as_in_one_process_with_the_same_micro_batches() -> None:
    float8 = pytest.importorskip("torchao.float8")
    module, batches = models.build(models.MLP), models.vectors((8, 8))
    config = float8.Float8LinearConfig(emulate=True, pad_inner_dim=True)
    float8.convert_to_float8_training(module.blocks, config=config)
    verdict = check(module, batches, HanayoStrategy(schedule="hanayo-zb"), devices=2, steps=2, dtype=torch.float32)
    assert verdict.outcome == "depends on micro-batches"
    assert verdict.layout is not None and verdict.layout.gap < 1e-6
    with pytest.raises(UnsupportedError, match=r"^blocks.0.up is a Float8Linear, which scales"):
        check_quantized_layers(module)

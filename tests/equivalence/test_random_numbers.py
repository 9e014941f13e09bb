"""Random numbers (masks, noise, dropped layers) are the same on every layout and schedule, and after a resume.

P = 1, B = 4      all blocks in one process           the reference, equal to a loop that seeds each stream by its key
P = 2, W = 2      each block draws the same numbers on another rank
"""

import warnings
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.seeds import mix, seed_of
from tests.harness import models
from tests.harness.models import NUM_BLOCKS, Batch
from tests.harness.oracle import split
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    Training,
    assert_close,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
)

DOUBLE = torch.float64
BATCHES = partial(models.vectors, (8, 11, 8))
ONE_PROCESS = Layout(1, 1, 1, "1f1b")
"""HanayoStrategy with one stage: blocks run when the step calls them"""


class DroppingBlock(models.Block):
    """Draws in a dropout module, a dropout function, and for noise."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(super().forward(self.dropout(x)), 0.1, self.training)
        return x + 0.01 * torch.randn_like(x)


class Dropping(models.MLP):
    """Draws before the stack, in every block, and after the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.embedding(x), 0.1, self.training)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(functional.dropout(x, 0.1, self.training))

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)


class CheckpointedOutside(Dropping):
    """The step checkpoints each block, so that it is recomputed in the backward."""

    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=False)


class Reentrant(Dropping):
    def call(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=True)


class CheckpointedBlock(DroppingBlock):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedInside(Dropping):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:  # don't construct new ones: they would have other values
            block.__class__ = CheckpointedBlock


LAYOUTS = [
    Layout(2, 2, 1, "hanayo-zb"),
    Layout(4, 1, 1, "1f1b"),
    Layout(1, 2, 1),
    Layout(2, 1, 1),
    Layout(2, 1, 1, "gpipe"),
    Layout(2, 1, 1, "zbv"),
]


@cache
def reference(pool: Pool, model: Any = Dropping, accumulate: int = 1) -> Outcome:
    (outcome,) = pool.run(1, fit, model, ONE_PROCESS, accumulate)
    return outcome


def fit(model: Any, layout: Layout, accumulate: int = 1) -> Outcome:
    callback = OutcomeCallback()
    trainer = make_trainer(
        layout,
        strategy=make_strategy(layout),
        max_steps=3,
        accumulate_grad_batches=accumulate,
        callbacks=[callback],
    )
    module = models.build(model, DOUBLE)
    share = Training(model, BATCHES, DOUBLE).share(data_rank(layout), layout.data)
    trainer.fit(module, make_loader(share))
    return callback.outcome


def by_hand(model: Any, seed: int) -> tuple[dict[str, Tensor], float]:
    """The first batch's gradients and loss, with every random stream seeded by its key."""
    module = models.build(model, DOUBLE)
    module.log = lambda *_, **__: None  # type: ignore[method-assign,assignment]
    (batch, *_) = Training(model, BATCHES, DOUBLE).share(0, 1)
    total = 0.0
    for m, part in enumerate(split(batch, 4)):
        key = seed_of(seed, 0, "train 0 0", m)

        def call(index: int, inner: Any, x: Tensor, key: int = key) -> Tensor:
            torch.randint(1 << 62, ())
            state = torch.get_rng_state()
            torch.default_generator.manual_seed(mix(key, index))
            y = inner(x)
            torch.set_rng_state(state)
            return y

        inners = [type(block).forward.__get__(block) for block in module.blocks]
        for index, (block, inner) in enumerate(zip(module.blocks, inners, strict=True)):
            block.forward = partial(call, index, inner)
        torch.default_generator.manual_seed(key)
        loss = module.training_step(part, 0)
        (loss * len(part["x"]) / len(batch["x"])).backward()
        total += loss.item() * len(part["x"]) / len(batch["x"])
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}, total


def test_streams_are_seeded_by_their_keys(pool: Pool) -> None:
    ((gradients, loss),) = pool.run(1, by_hand, Dropping, 0)
    outcome = reference(pool)
    assert_close(outcome.gradients, gradients, 1e-12)
    assert outcome.losses[0] == pytest.approx(loss)


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=LAYOUTS[1:2]), ids=str)
def test_masks_do_not_depend_on_the_layout(pool: Pool, layout: Layout) -> None:
    outcome = merge(pool.run(layout.world_size, fit, Dropping, layout), layout)
    assert_close(outcome.weights, reference(pool).weights, 1e-10)
    assert outcome.losses == pytest.approx(reference(pool).losses)


WAVES = Layout(2, 2, 1, "hanayo-zb")
RECOMPUTED = [
    (CheckpointedOutside, ONE_PROCESS),
    (CheckpointedOutside, WAVES),
    (CheckpointedInside, ONE_PROCESS),
    (CheckpointedInside, WAVES),
    (Reentrant, ONE_PROCESS),  # in a pipeline the re-entrant form fails on a block's proxy output
]


@pytest.mark.parametrize(
    ("model", "layout"),
    covered(RECOMPUTED, by=[RECOMPUTED[1], RECOMPUTED[3]]),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_masks_do_not_depend_on_recomputation(pool: Pool, model: Any, layout: Layout) -> None:
    outcome = merge(pool.run(layout.world_size, fit, model, layout), layout)
    assert_close(outcome.weights, reference(pool).weights, 1e-10)


def test_accumulated_batches_draw_different_numbers(pool: Pool) -> None:
    outcome = merge(pool.run(2, fit, Dropping, Layout(2, 1, 1), 2), Layout(2, 1, 1))
    assert_close(outcome.weights, reference(pool, accumulate=2).weights, 1e-10)


@pytest.mark.parametrize("data", [2])
def test_data_ranks_draw_different_numbers_that_do_not_depend_on_the_layout(pool: Pool, data: int) -> None:
    alone, wave = Layout(1, 1, data, "1f1b"), Layout(2, 1, data)
    outcomes = [merge(pool.run(layout.world_size, fit, Dropping, layout), layout) for layout in (alone, wave)]
    assert_close(outcomes[1].weights, outcomes[0].weights, 1e-10)
    first, second = pool.run(2, masks, alone)
    assert first[0, 0] != second[0, 0]


class DrawRecorder(models.MLP):
    """Records the numbers that each block draws, per micro-batch."""

    class Block(models.Block):
        def forward(self, x: Tensor) -> Tensor:
            self.notes.append(torch.rand(4).tolist())  # type: ignore[union-attr]
            return super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(NUM_BLOCKS))
        for block in self.blocks:
            block.notes = []  # type: ignore[assignment]


def masks(layout: Layout) -> dict[tuple[int, int], list[float]]:
    """The numbers that this rank's blocks draw in the first batch, by (micro-batch, block)."""
    trainer = make_trainer(layout, strategy=make_strategy(layout), max_steps=1)
    module = models.build(DrawRecorder)
    trainer.fit(module, make_loader(models.vectors((8,))))
    return {(m, i): note for i, block in enumerate(module.blocks) for m, note in enumerate(block.notes)}  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", [Layout(2, 2, 1, "hanayo-zb")], ids=str)
def test_no_two_draws_are_equal(pool: Pool, layout: Layout) -> None:
    """Neither of two stages, nor of two micro-batches, nor shifted by one draw."""
    merged = {key: note for rank in pool.run(2, masks, layout) for key, note in rank.items()}
    assert len(merged) == 4 * NUM_BLOCKS
    assert merged == pool.run(1, masks, ONE_PROCESS)[0]
    numbers = [number for note in merged.values() for number in note]
    assert len(set(numbers)) == len(numbers)


def saved(path: str, layout: Layout, steps: int, resume: str | None) -> Outcome:
    """Three equal batches per epoch, so that the loader's restart in the middle of an epoch makes no difference."""
    warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
    callback = OutcomeCallback()
    trainer = make_trainer(layout, strategy=make_strategy(layout), max_steps=steps, callbacks=[callback])
    (batch,) = Training(Dropping, partial(models.vectors, (8,)), DOUBLE).share(0, 1)
    trainer.fit(models.build(Dropping, DOUBLE), make_loader([batch] * 3), ckpt_path=resume)
    trainer.save_checkpoint(path)
    return callback.outcome


RESUMED = [(2, ONE_PROCESS), (3, Layout(2, 1, 1)), (2, Layout(2, 1, 1)), (3, ONE_PROCESS)]


@pytest.mark.parametrize(("stop", "then"), covered(RESUMED, by=RESUMED[1:2]), ids=str)
def test_a_resumed_run_draws_the_same_numbers_as_an_uninterrupted_one(
    pool: Pool, tmp_path: Any, then: Layout, stop: int
) -> None:
    (whole,) = pool.run(1, saved, str(tmp_path / "whole.ckpt"), ONE_PROCESS, 5, None)
    pool.run(2, saved, str(tmp_path / "first.ckpt"), Layout(2, 1, 1), stop, None)
    resumed = pool.run(then.world_size, saved, str(tmp_path / "then.ckpt"), then, 5, str(tmp_path / "first.ckpt"))
    assert_close(merge(resumed, then).weights, whole.weights, 1e-10)


class Sampling(Dropping):
    """Predicts with dropout, as for Monte Carlo dropout."""

    def on_predict_start(self) -> None:
        self.train()

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self(batch["x"])


def predictions(layout: Layout) -> list[float]:
    """Two predictions of one Trainer, and one of a second Trainer."""
    trainer = make_trainer(layout, strategy=make_strategy(layout))
    module, loader = models.build(Sampling, DOUBLE), make_loader(models.vectors((8, 8), DOUBLE))
    found = [trainer.predict(module, loader) for _ in range(2)]
    found.append(make_trainer(layout, strategy=make_strategy(layout)).predict(module, loader))
    return [sum(part.sum().item() for part in parts if isinstance(part, Tensor)) for parts in found if parts]


@pytest.mark.thorough
def test_predictions_draw_different_numbers_that_do_not_depend_on_the_layout(pool: Pool) -> None:
    (expected,) = pool.run(1, predictions, ONE_PROCESS)
    assert len(set(expected)) == 3
    for layout in (WAVES, Layout(2, 1, 1, "1f1b")):
        assert pool.run(2, predictions, layout)[0] == pytest.approx(expected, rel=1e-10)


class Batches:
    """Reading it draws no number, as reading a loader does."""

    def __iter__(self) -> Iterator[Batch]:
        yield from models.vectors((8, 8), DOUBLE)


def predictions_without_loader(layout: Layout) -> list[float]:
    trainer = make_trainer(layout, strategy=make_strategy(layout))
    module = models.build(Sampling, DOUBLE)
    found = [trainer.predict(module, Batches()) for _ in range(3)]
    return [sum(part.sum().item() for part in parts if isinstance(part, Tensor)) for parts in found if parts]


def test_predictions_draw_different_numbers_if_nothing_else_draws(pool: Pool) -> None:
    assert len(set(pool.run(1, predictions_without_loader, ONE_PROCESS)[0])) == 3


class TwoViews(CheckpointedInside):
    """Two passes through the stack, which differ only by dropout."""

    def loss(self, batch: Batch) -> Tensor:
        first, second = self(batch["x"]), self(batch["x"])
        self.log("apart", (first - second).abs().mean())
        return functional.cross_entropy(first, batch["y"]) + second.square().mean()


class TwoViewsCheckpointed(CheckpointedOutside, TwoViews):
    """The same, and every block is recomputed once more."""


class FromTarget(TwoViews):
    """The first view has no gradients."""

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            target = self(batch["x"])
        return (self(batch["x"]) - target).square().mean()


def views(model: Any, layout: Layout) -> tuple[float, Outcome]:
    warnings.filterwarnings("ignore", message="the step makes 2 passes")
    callback = OutcomeCallback()
    trainer = make_trainer(layout, strategy=make_strategy(layout), max_steps=1, callbacks=[callback])
    trainer.fit(models.build(model, DOUBLE), make_loader(models.vectors((8,), DOUBLE)))
    return float(trainer.callback_metrics.get("apart", 0.0)), callback.outcome


def test_a_second_pass_draws_different_numbers(pool: Pool) -> None:
    """Contrastive training needs this. A recomputed block draws the numbers of its own pass again."""
    ((apart, expected),) = pool.run(1, views, TwoViews, ONE_PROCESS)
    assert apart > 1e-3
    ((again, recomputed),) = pool.run(1, views, TwoViewsCheckpointed, ONE_PROCESS)
    assert again == apart
    assert_close(recomputed.gradients, expected.gradients, 1e-12)


@pytest.mark.parametrize("model", covered([TwoViews, TwoViewsCheckpointed, FromTarget], by=[TwoViews]))
def test_each_pass_draws_the_same_numbers_on_a_pipeline(pool: Pool, model: Any) -> None:
    ((_, expected),) = pool.run(1, views, model, ONE_PROCESS)
    ranks = [outcome for _, outcome in pool.run(2, views, model, WAVES)]
    assert_close(merge(ranks, WAVES).gradients, expected.gradients, 1e-12)


def states(layout: Layout) -> tuple[bool, bool, list[float]]:
    """Whether a batch leaves torch's generator unchanged, and whether the run has an ordinary Trainer's weights."""
    before: list[Tensor] = []
    same: list[bool] = []

    class Watching(OutcomeCallback):
        def on_train_batch_start(self, *_: Any) -> None:
            before.append(torch.get_rng_state())

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            same.append(torch.equal(torch.get_rng_state(), before.pop()))

    callback = Watching()
    strategy = make_strategy(layout) if layout.num_microbatches else "auto"
    trainer = make_trainer(layout, strategy=strategy, max_steps=2, callbacks=[callback])
    module: LightningModule = models.build(Dropping, DOUBLE)
    torch.manual_seed(7)
    trainer.fit(module, make_loader(models.vectors((8, 8), DOUBLE)))
    return all(same), torch.initial_seed() == 7, [w.sum().item() for w in callback.outcome.weights.values()]


def test_torchs_generator_is_unchanged(pool: Pool) -> None:
    for layout in (ONE_PROCESS, Layout(2, 1, 1)):
        for same, seed, _ in pool.run(layout.world_size, states, layout):
            assert same and seed


def test_one_rank_with_one_microbatch_draws_the_numbers_of_an_ordinary_trainer(pool: Pool) -> None:
    ((_, _, with_strategy),) = pool.run(1, states, Layout(num_microbatches=1, schedule="auto"))
    ((_, _, plain),) = pool.run(1, states, Layout(num_microbatches=0))
    assert with_strategy == plain


@pytest.mark.thorough
@pytest.mark.parametrize("outside", ["share", "replicate"])
def test_a_cube_draws_the_same_numbers_with_and_without_waves(pool: Pool, outside: str) -> None:
    cubes = [Layout(1, 1, 1, "1f1b", cube=(1, 2, 1), outside=outside)]
    cubes.append(Layout(1, 2, 1, "hanayo-zb", cube=(1, 2, 1), outside=outside))
    outcomes = [merge(pool.run(layout.world_size, fit, Dropping, layout), layout) for layout in cubes]
    assert_close(outcomes[1].weights, outcomes[0].weights, 1e-10)

"""With `cube_outside="tokens"` embedding and head stay sharded by rows while a batch runs, unseen by user code."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_hanayo.errors import PeerFailed, UnsupportedError
from lightning_hanayo.tensor_parallel.outside_parameters import vocabulary_weights
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import (
    Layout,
    Training,
    assert_close,
    make_loader,
    make_strategy,
    make_trainer,
    own_weights,
    run,
)
from tests.strategy.losses.test_token_losses import Watch, exact

CUBES = [(1, 2, 1), (2, 1, 1), (1, 2, 2), (2, 2, 1)]
LAYOUTS = [*(Layout(cube=cube, outside="tokens") for cube in CUBES), Layout(2, cube=(1, 2, 1), outside="tokens")]
LAYOUTS += [Layout(cube=(1, 2, 1), outside="tokens", step="auto")]  # in dry runs weights are whole
WORDS = 500


def tied() -> LightningModule:
    """With as many heads as the largest cube needs."""
    return models.gpt2(4)


def untied() -> LightningModule:
    module: Any = tied()
    module.model.lm_head.weight = nn.Parameter(module.model.lm_head.weight.detach().clone())
    return module


def recipe() -> LightningModule:
    """A step that calls `chunked_cross_entropy` with the embedding's weight."""
    from recipes.gpt.chunked import ChunkedGPT

    return ChunkedGPT(models.VOCABULARY, 16, models.NUM_BLOCKS, models.WIDTH, num_heads=4)


class Doubled(torch.autograd.Function):
    """A function that doesn't ask how its arguments are held."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return 2 * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class UsesWeights(models.HuggingFace):
    """Computes with embedding and head in ways that need the whole."""

    def loss(self, batch: models.Batch) -> Tensor:
        head, table = self.model.lm_head.weight, self.model.transformer.wte.weight
        assert table.shape == (models.VOCABULARY, models.WIDTH)
        penalty = head.square().sum() + table[3].sum() + Doubled.apply(table).norm() + table.data.mean()
        padded = functional.embedding(torch.arange(9) % 7, table, padding_idx=5).square().sum()
        loss: Tensor = self.model(**batch).loss
        return loss + 0.1 * penalty + padded


def uses_weights() -> LightningModule:
    module: Any = untied()
    return UsesWeights(module.model)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("make", "layout"),
    [*product([tied, untied, recipe, uses_weights], LAYOUTS)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_clipped_training_equals_one_process(pool: Pool, make: Callable[[], LightningModule], layout: Layout) -> None:
    """Gradients are accumulated over two batches, and clipped."""
    training = Training(make, partial(models.texts, (4,) * 4), torch.float64, steps=2, accumulate=2, clip=0.05)
    ours = run(pool, replace(training, loss_weight="tokens"), layout)
    alone = run(pool, replace(training, model=partial(exact, make)), Layout())
    assert_close(ours.gradients, alone.gradients, 1e-12)
    assert_close(ours.weights, alone.weights, 1e-11)


class Rows(Callback):
    """Notes the largest tensor with as many columns as the model is wide, of a batch's blocks of code on this rank."""

    def __init__(self) -> None:
        self.watch = Watch(models.WIDTH, set())

    def on_train_start(self, *_: Any) -> None:
        self.watch.__enter__()

    def on_train_end(self, *_: Any) -> None:
        self.watch.__exit__(None, None, None)


def largest_rows(layout: Layout) -> tuple[int, int, bool]:
    """The rows of the largest such tensor in steps and elsewhere; and whether the weight is whole in steps."""
    from recipes.gpt.chunked import ChunkedGPT

    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    in_step, is_whole = Watch(models.WIDTH, set()), []

    class Watched(ChunkedGPT):
        def training_step(self, *args: Any) -> Any:
            is_whole.append(type(self.token.weight) is nn.Parameter)
            with in_step:
                return super().training_step(*args)

    rows = Rows()
    trainer = make_trainer(layout, strategy=make_strategy(layout), max_steps=2, callbacks=[rows])
    trainer.fit(Watched(WORDS, 16, 4, models.WIDTH, num_heads=2), make_loader(models.texts((4, 4))))
    return in_step.largest // models.WIDTH, rows.watch.largest // models.WIDTH, is_whole[0]


@pytest.mark.parametrize("outside", ["share", "tokens"])
def test_no_rank_has_the_whole_embedding(pool: Pool, outside: str) -> None:
    """Nor its whole gradient: of 500 rows, two ranks make tensors of 250."""
    for in_step, elsewhere, is_whole in pool.run(2, largest_rows, Layout(cube=(1, 2, 1), outside=outside)):
        assert is_whole is (outside == "share")
        assert max(in_step, elsewhere) == (WORDS if is_whole else WORDS // 2)


def twice() -> list[models.Batch]:
    """The same batch in both steps: the second run begins at the first one."""
    return models.texts((4,)) * 2


def part_of_run(layout: Layout, steps: int, path: Path, *, resumes: bool) -> dict[str, Tensor]:
    """Train up to this step, from a checkpoint or not, and save one."""
    warnings.filterwarnings("ignore", message=".*resuming from a checkpoint that ended before the epoch")
    trainer = make_trainer(layout, loss_weight="tokens", max_steps=steps)
    make = models.gpt2 if layout.outside == "tokens" else partial(exact, models.gpt2)
    module = models.build(make, torch.float64)
    trainer.fit(module, make_loader(twice()), ckpt_path=path if resumes else None)
    trainer.save_checkpoint(path)
    return own_weights(module, trainer)


@pytest.mark.thorough
@pytest.mark.parametrize("second", [Layout(2), Layout(cube=(2, 1, 1)), LAYOUTS[4]], ids=str)
def test_a_checkpoint_is_resumed_in_another_layout(pool: Pool, tmp_path: Path, second: Layout) -> None:
    path = tmp_path / "saved.ckpt"
    pool.run(2, partial(part_of_run, resumes=False), LAYOUTS[0], 1, path)
    parts = pool.run(second.world_size, partial(part_of_run, resumes=True), second, 2, path)
    ours: dict[str, Tensor] = {}
    for part in parts:
        ours |= part
    training = Training(partial(exact, models.gpt2), twice, torch.float64, steps=2)
    assert_close(ours, run(pool, training, Layout()).weights, 1e-11)


class Evaluates(models.HuggingFace):
    """Validates by whole logits and by generated tokens."""

    def validation_step(self, batch: models.Batch) -> None:
        logits = self.model(input_ids=batch["input_ids"]).logits
        made = self.model.generate(
            batch["input_ids"], max_new_tokens=3, min_new_tokens=3, use_cache=False, do_sample=False
        )
        self.log("logits", logits.double().logsumexp(-1).mean())
        self.log("made", made.double().mean())


def evaluated(layout: Layout) -> tuple[float, float]:
    module: Any = models.gpt2()
    trainer = make_trainer(layout)
    trainer.validate(models.build(lambda: Evaluates(module.model), torch.float64), make_loader(models.texts((4,))))
    return float(trainer.callback_metrics["logits"]), float(trainer.callback_metrics["made"])


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=str)
def test_evaluation_equals_one_process(pool: Pool, layout: Layout) -> None:
    ours, (alone,) = pool.run(layout.world_size, evaluated, layout), pool.run(1, evaluated, Layout())
    assert ours == [pytest.approx(alone, rel=1e-6)] * layout.world_size  # logged in fp32


class ChangesView(models.HuggingFace):
    """Sets a row of the head to zero in a step."""

    def loss(self, batch: models.Batch) -> Tensor:
        self.model.lm_head.weight.data[0].zero_()
        loss: Tensor = self.model(**batch).loss
        return loss


def changes_view(layout: Layout) -> None:
    module: Any = models.gpt2()
    trainer = make_trainer(layout, loss_weight="tokens", max_steps=1)
    with pytest.raises((UnsupportedError, PeerFailed), match=r"wte.weight is changed in place by way of a view"):
        trainer.fit(models.build(lambda: ChangesView(module.model)), make_loader(models.texts((4,))))


@pytest.mark.thorough
def test_a_change_by_way_of_a_view_is_refused(pool: Pool) -> None:
    pool.run(2, changes_view, LAYOUTS[0])


def test_weights_of_the_vocabulary() -> None:
    """Of the largest embedding, and of layers with as many rows; not where torch would need the whole."""
    table, places, head, other = nn.Embedding(9, 4), nn.Embedding(5, 4), nn.Linear(4, 9), nn.Linear(4, 3)
    assert vocabulary_weights([table, places, head, other]) == [table.weight, head.weight]
    head.weight = table.weight
    assert vocabulary_weights([table, head]) == [table.weight]
    table.max_norm = 1.0
    assert vocabulary_weights([table, head]) == []
    head = nn.Linear(4, 5)
    head.weight.register_hook(torch.clone)
    assert vocabulary_weights([places, head]) == [places.weight]
    vars(places)["_compiled_call_impl"] = len
    assert vocabulary_weights([places]) == []

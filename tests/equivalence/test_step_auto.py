"""`step="auto"`: a probe finds out how micro-batches add up; training and validation equal one process."""

import warnings
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from recipes.gpt.module import GPT
from tests.equivalence import test_whole_step as whole
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    Training,
    assert_close,
    fit,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
)

P1 = Layout(1, 1, 1, "1f1b", step="auto")
"""a single stage and four micro-batches"""
P2 = Layout(2, 1, 1, step="auto")
W2 = Layout(2, 2, 1, step="auto")


class Summed(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"], reduction="sum")


class Ignores(models.MLP):
    """One class isn't learned."""

    def loss(self, batch: Batch) -> Tensor:
        loss = functional.cross_entropy(self(batch["x"]), batch["y"], ignore_index=1)
        self.log("count", float((batch["y"] != 1).sum()), reduce_fx="sum")
        return loss


class Weighted(models.MLP):
    """A mean by weights of the batch, beside one over samples that is logged."""

    def loss(self, batch: Batch) -> Tensor:
        weights = batch["x"][:, 0].square()
        scores = self(batch["x"])
        self.log("accuracy", (scores.argmax(1) == batch["y"]).double().mean())
        losses = functional.cross_entropy(scores, batch["y"], reduction="none")
        return (losses * weights).sum() / weights.sum()


class Perplexity(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        self.log("perplexity", loss.detach().exp())
        return loss


class Penalised(models.MLP):
    """A penalty on weights beside a sum over samples."""

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"], reduction="sum") + self.head.weight.square().sum()


class Dropped(models.MLP):
    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(functional.dropout(self(batch["x"]), 0.0), batch["y"])


class Preferred(models.MLP):
    """DPO in one pass: the chosen samples, and after them the rejected ones."""

    def loss(self, batch: Batch) -> Tensor:
        chosen, rejected = self(torch.cat([batch["x"], batch["x"].flip(1)])).chunk(2)
        return -functional.logsigmoid(chosen.logsumexp(1) - rejected.logsumexp(1)).mean()


class Within(models.Block):
    """Compares the rows of each sample, which follow on each other."""

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return super().forward(x - x.unflatten(0, (len(ends) - 1, -1)).mean(1).repeat_interleave(int(ends[1]), 0))


class Packed(models.MLP):
    """All samples are one sequence, as patches of images are: where they end has one number more than samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Within() for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(torch.stack([x, x.square()], 1)).flatten(0, 1)
        ends = torch.arange(0, len(x) + 1, 2)
        for block in self.blocks:
            x = block(x, ends)
        return self.head(x.unflatten(0, (-1, 2)).sum(1))

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"], ignore_index=1)


class Attends(models.Block):
    """Without a mask it computes something else than with one that masks nothing."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(2 * x if mask is None else x * mask)


class Masks(models.MLP):
    """Gives blocks a mask only where there is something to mask, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attends() for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        mask = x[:, :1] > -1.0
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, None if mask.all() else mask)
        return self.head(x)


def auto(training: Training, layout: Layout) -> tuple[Outcome, dict[str, Any]]:
    found: dict[str, Any] = {}
    from lightning_hanayo.strategy.probing import step_choice

    take = step_choice.StepChoice._take

    def note(self: Any, verdicts: Any, *, fits: bool) -> tuple[bool, bool]:
        made = take(self, verdicts, fits=fits)
        found.setdefault("verdicts", []).append([(one.rules, one.difference, one.unknown) for one in verdicts])
        found["rules"], found["once"] = list(map(str, self.rules.loss.rules)), self.runs_once
        return made

    step_choice.StepChoice._take = note  # type: ignore[method-assign]
    try:
        return fit(training, layout), found
    finally:
        step_choice.StepChoice._take = take  # type: ignore[method-assign]


RULES: list[tuple[Any, str]] = [
    (models.MLP, "samples"), (Summed, "nothing: the losses are added up"),
    (whole.Constant, "nothing: the losses are added up"),
    (Ignores, "the values of batch['y'] other than 1"), (models.Skip, "samples"), (Dropped, "samples"),
    (Preferred, "samples"), (Packed, "the values of batch['y'] other than 1"),
    (models.gpt2, "the values of batch['labels'] other than -100, without the first of each sequence"),
    (models.llama, "the values of batch['labels'] other than -100, without the first of each sequence"),
]  # fmt: skip
WHOLE: list[Any] = [
    whole.Contrastive, whole.Whitened, whole.TwoDenominators, whole.Normalized, whole.Counts,
    Weighted, Perplexity, Penalised, Masks,
]  # fmt: skip


LOSSES = [*RULES, *((model, "") for model in WHOLE)]
KINDS = [
    models.MLP, Summed, Ignores, Packed, models.gpt2, whole.Contrastive, whole.TwoDenominators, whole.Counts, Weighted,
    Masks,
]  # fmt: skip
"""of rules, and of reasons why there is none"""
COVERED = [(one, (P1, P2, W2)[i % 3]) for i, one in enumerate(LOSSES) if one[0] in KINDS]


@pytest.mark.parametrize(
    ("loss", "layout"),
    covered(product(LOSSES, (P1, P2, W2)), by=COVERED),
    ids=lambda v: getattr(v[0], "__name__", None) if type(v) is tuple else None,
)
def test_equals_one_process(pool: Pool, loss: tuple[Any, str], layout: Layout) -> None:
    model, rule = loss
    is_text = model in (models.gpt2, models.llama)
    batches = partial(models.padded, (8, 8, 6), (8,)) if is_text else partial(models.vectors, (8, 8, 6))
    training = Training(model, batches, dtype=torch.float64, steps=3)
    made = pool.run(layout.world_size, auto, training, layout)
    outcome, found = merge([one for one, _ in made], layout), made[0][1]
    print(found)
    expected = plain(pool, training)
    tolerance = 1e-6 if is_text else 1e-12
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance), found
    assert_close(outcome.gradients, expected.gradients, tolerance)
    assert_close(outcome.weights, expected.weights, 100 * tolerance)
    assert (found["rules"][:1] or [""])[0] == rule or found["once"] == (not rule), found


SHARE = Layout(1, 1, 1, cube=(1, 2, 1), step="auto")
SHARE_P2 = Layout(2, 1, 1, cube=(1, 2, 1), step="auto")
SHARE_22 = Layout(1, 1, 1, cube=(2, 2, 1), step="auto")
REPLICATE = Layout(1, 1, 1, cube=(1, 2, 1), outside="replicate", step="auto")
REPLICATE_P2 = Layout(2, 1, 1, cube=(2, 1, 1), outside="replicate", step="auto")


ALONG_X = Layout(1, 1, 1, cube=(2, 1, 1), step="auto")
"""the heads of the small Llama don't divide"""


class Unfrozen(models.MLP):
    """The embedding learns from the second step on, and a value is logged from the third one on."""

    def loss(self, batch: Batch) -> Tensor:
        scores = self(batch["x"])
        if self.global_step > 1:
            self.log("late", scores.square().mean().sqrt())
        return functional.cross_entropy(scores, batch["y"])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.embedding.requires_grad_(batch_idx > 0)


def test_changes_are_probed(pool: Pool) -> None:
    training = Training(Unfrozen, partial(models.vectors, (8, 8, 8, 8)), dtype=torch.float64, steps=4)
    made = pool.run(2, auto, training, P2)
    outcome, expected = merge([one for one, _ in made], P2), plain(pool, training)
    assert_close(outcome.weights, expected.weights, 1e-10)
    verdicts = made[0][1]["verdicts"]
    assert len(verdicts) == 3 and "'late'" in verdicts[-1][0][1]


class SavesEpochs(whole.Contrastive):
    def on_train_epoch_end(self) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "last.ckpt")


def resumed(folder: Path) -> list[bool]:
    """Of an epoch of two steps, and of one that resumes: whether it was known before that they run once."""
    from lightning_hanayo.strategy.probing import step_choice

    told: list[bool] = []
    trains_once = step_choice.StepChoice.trains_once

    def note(self: Any, *arguments: Any, **options: Any) -> bool:
        told.append(self.runs_once)
        return trains_once(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_choice.StepChoice, "trains_once", note)
        for epochs, start in ((1, None), (2, folder / "last.ckpt")):
            trainer = make_trainer(P2, strategy=make_strategy(P2), max_epochs=epochs, default_root_dir=folder)
            module = models.build(SavesEpochs, torch.float64)
            trainer.fit(module, make_loader(models.vectors((8, 8), torch.float64)), ckpt_path=start)
    return told


def test_a_resumed_run_goes_on_with_steps_for_whole_batches(pool: Pool, tmp_path: Path) -> None:
    told, _ = pool.run(2, resumed, tmp_path)
    assert told == [False, True, True, True]


IN_CUBES = [
    *product([one for one in LOSSES if one[0] is not models.llama], (SHARE, SHARE_P2, SHARE_22, REPLICATE)),
    *product(LOSSES, (ALONG_X, REPLICATE_P2)),
]


@pytest.mark.parametrize(
    ("loss", "layout"),
    covered(
        IN_CUBES,
        by=[((whole.Contrastive, ""), SHARE_P2)],
    ),
    ids=lambda v: getattr(v[0], "__name__", None) if type(v) is tuple else None,
)
def test_in_cubes(pool: Pool, loss: tuple[Any, str], layout: Layout) -> None:
    """The same, also where the ranks of a cube share the samples of micro-batches, but not those of whole batches."""
    model, rule = loss
    is_text = model in (models.gpt2, models.llama)
    batches = partial(models.padded, (8, 8, 6), (8,)) if is_text else partial(models.vectors, (8, 8, 6))
    training = Training(model, batches, dtype=torch.float64, steps=3)
    made = pool.run(layout.world_size, auto, training, layout)
    outcome, (_, found) = merge([one for one, _ in made], layout), made[0]
    assert rule in found["rules"] if rule else found["once"], found
    expected = plain(pool, training)
    tolerance = 1e-6 if is_text else 1e-12
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance), found
    assert_close(outcome.weights, expected.weights, 100 * tolerance)


class Evaluates(models.MLP):
    """Metrics that no mean over micro-batches gives."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        scores = self(batch["x"])
        loss = functional.cross_entropy(scores, batch["y"])
        self.log("perplexity", loss.exp())
        self.log("spread", scores.std(0).max(), reduce_fx="max")


def validate(layout: Layout, model: Any = Evaluates, *, fits: bool = True) -> tuple[Any, list[str]]:
    """The metrics, and the warnings."""
    from lightning_hanayo.strategy.probing import step_choice

    strategy = {"strategy": make_strategy(layout)} if layout.world_size > 1 else {}
    trainer = make_trainer(layout, **strategy)
    module = models.build(model, torch.float64)
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        if not fits:
            patch.setattr(step_choice.StepChoice, "_fits", lambda *_: False)
        sizes = (8, 6) if fits else (16, 12)
        found = trainer.validate(module, make_loader(models.vectors(sizes, torch.float64)), verbose=False)
    return found, [str(one.message) for one in caught if "don't add up" in str(one.message)]


@pytest.mark.parametrize("layout", covered([P2, SHARE], by=[P2]), ids=["pipeline", "cube"])
def test_metrics_of_an_evaluation(pool: Pool, layout: Layout) -> None:
    (((expected,), _),) = pool.run(1, validate, Layout())
    (((made,), texts), *_) = pool.run(2, validate, layout)
    assert made == pytest.approx(expected, rel=1e-12) and not texts


class IgnoresInValidation(models.MLP):
    """A loss that is logged, one that is returned, and one that is a mean over samples, of which a class is ignored."""

    def validation_step(self, batch: Batch, batch_idx: int) -> Tensor:
        scores = self(batch["x"])
        loss = functional.cross_entropy(scores, batch["y"], ignore_index=1)
        self.log("loss", loss)
        self.log("size", scores.square().mean())
        return loss


def test_values_of_an_evaluation_in_parts_have_rules(pool: Pool) -> None:
    run = partial(validate, fits=False)
    (((expected,), _),) = pool.run(1, run, Layout(), IgnoresInValidation)
    (((made,), texts), *_) = pool.run(2, run, P2, IgnoresInValidation)
    assert made == pytest.approx(expected, rel=1e-12) and not texts


def test_a_metric_of_an_evaluation_in_parts_is_named(pool: Pool) -> None:
    ((_, (text,)), *_) = pool.run(2, partial(validate, fits=False), P2)
    assert "the values of micro-batches don't add up to those of Evaluates's validate step" in text
    assert "torchmetrics.Metric" in text


DATA = [Ignores, whole.Contrastive, models.MLP, Summed, Perplexity]


OF_DATA = [
    Layout(2, 1, 2, step="auto"),
    Layout(1, 1, 2, cube=(1, 2, 1), step="auto"),
    Layout(1, 1, 2, cube=(1, 2, 1), outside="replicate", step="auto"),
]


@pytest.mark.parametrize(("model", "layout"), covered(product(DATA, OF_DATA), by=[(Ignores, OF_DATA[0])]))
def test_data_ranks_count_as_in_ddp(pool: Pool, model: Any, layout: Layout) -> None:
    """The mean of both data ranks' losses, whatever they count."""
    training = Training(model, partial(models.vectors, (16, 12, 16)), dtype=torch.float64, steps=3)
    made = pool.run(4, auto, training, layout)
    outcome = merge([one for one, _ in made], layout)
    of_ddp = pool.run(2, fit_ddp, training)
    assert_close(outcome.weights, of_ddp[0], 1e-10)


def fit_ddp(training: Training) -> Any:
    """Train on two ranks of DDP."""
    import os

    from lightning.pytorch.strategies import DDPStrategy

    rank = int(os.environ["RANK"])
    module = models.build(training.model, training.dtype)
    trainer = make_trainer(
        Layout(), devices=2, strategy=DDPStrategy(find_unused_parameters=False), max_steps=training.steps
    )
    trainer.fit(module, make_loader(training.share(rank, 2)))
    return {name: one.detach().clone() for name, one in module.named_parameters()}


def test_single_samples(pool: Pool) -> None:
    """Micro-batches of one sample."""
    training = Training(Ignores, partial(models.vectors, (4, 4, 3)), dtype=torch.float64, steps=3)
    made = pool.run(2, auto, training, P2)
    outcome, expected = merge([one for one, _ in made], P2), plain(pool, training)
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-12), made[0][1]
    assert_close(outcome.weights, expected.weights, 1e-10)


def in_little_memory(training: Training, layout: Layout) -> tuple[Outcome, dict[str, Any]]:
    """No whole batch fits."""
    from lightning_hanayo.strategy.probing import step_choice

    fits = step_choice.StepChoice._fits
    step_choice.StepChoice._fits = lambda *_: False  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", message="the losses of micro-batches don't add up to")
    try:
        return auto(training, layout)
    finally:
        step_choice.StepChoice._fits = fits  # type: ignore[method-assign]


@pytest.mark.parametrize(("model", "rule"), covered(RULES, by=RULES[1:2]), ids=lambda v: getattr(v, "__name__", None))
def test_halves_of_micro_batches_tell_rules(pool: Pool, model: Any, rule: str) -> None:
    is_text = model in (models.gpt2, models.llama)
    batches = partial(models.padded, (8, 8, 6), (8,)) if is_text else partial(models.vectors, (16, 16, 12))
    training = Training(model, batches, dtype=torch.float64, steps=3)
    made = pool.run(2, in_little_memory, training, P2)
    found = made[0][1]
    assert rule in found["rules"], found
    outcome, expected = merge([one for one, _ in made], P2), plain(pool, training)
    assert_close(outcome.weights, expected.weights, 1e-4 if is_text else 1e-10)


LARGE = [one for one in WHOLE if one not in (whole.Counts, Masks)]


@pytest.mark.parametrize("model", covered(LARGE, by=LARGE[:1]), ids=lambda v: v.__name__)
def test_where_no_whole_batch_fits_the_difference_is_warned_of(pool: Pool, model: Any) -> None:
    training = Training(model, partial(models.vectors, (16, 16, 12)), dtype=torch.float64, steps=3)
    ((_, found), *_) = pool.run(2, in_little_memory, training, P2)
    assert any(row[0][1] for row in found["verdicts"]), found


@pytest.mark.parametrize(
    ("precision", "layout"),
    covered(
        [("32-true", P2), ("bf16-mixed", P2), ("bf16-true", P2), ("bf16-true", P1)],
        by=[("bf16-mixed", P2)],
    ),
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_rules_are_found_in_lower_precision(pool: Pool, precision: Any, layout: Layout) -> None:
    batches = partial(models.padded, (8, 8, 6), (8,))
    training = Training(models.gpt2, batches, dtype=torch.float32, steps=3, precision=precision)
    ((_, found), *_) = pool.run(layout.world_size, auto, training, layout)
    assert "the values of batch['labels'] other than -100, without the first of each sequence" in found["rules"], found


def deep() -> LightningModule:
    return GPT(vocab_size=64, context=256, num_layers=4, width=64, num_heads=4)


def random_tokens() -> list[Batch]:
    words = torch.randint(64, (2, 4, 257), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": one[:, :-1], "labels": one[:, 1:]} for one in words]


def test_rounding_of_many_layers_is_no_difference(pool: Pool) -> None:
    training = Training(deep, random_tokens, dtype=torch.float32, steps=2, precision="bf16-true")
    ((_, found),) = pool.run(1, auto, training, Layout(1, 1, 1, "auto", step="auto"))
    assert found["rules"][0] == "samples" and not found["once"], found


def named(training: Training, layout: Layout, loss_weight: str) -> list[str]:
    """The warnings of a training with a rule that the user has named."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, loss_weight, max_steps=training.steps)
        trainer.fit(models.build(training.model, training.dtype), make_loader(training.share(0, 1)))
    return [str(one.message) for one in caught]


@pytest.mark.parametrize(
    ("model", "loss_weight", "said"),
    [
        (models.MLP, "samples", ""), (whole.Constant, "sum", ""), (Summed, "samples", "they are weighed by nothing"),
        (whole.Contrastive, "samples", "the gradient at the stack's output differs by"),
    ],
)  # fmt: skip
def test_a_named_rule_is_checked(pool: Pool, model: Any, loss_weight: str, said: str) -> None:
    training = Training(model, partial(models.vectors, (8, 8)), dtype=torch.float64, steps=2)
    (texts, _) = pool.run(2, named, training, P2, loss_weight)
    found = [text for text in texts if "doesn't add up" in text]
    assert len(found) == bool(said) and said in "".join(found)


class Leaves(models.MLP):
    """All that a step may leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(models.CLASSES))
        self.accuracy = torchmetrics.MeanMetric()
        self.losses: list[float] = []
        self.count = 0

    def loss(self, batch: Batch) -> Tensor:
        batch["x"].mul_(0.5)
        scores = self(batch["x"])
        self.mean = self.mean.lerp(scores.detach().mean(0), 0.5)
        loss = functional.cross_entropy(scores, batch["y"])
        self.losses.append(float(loss.detach()))
        self.count += 1
        self.accuracy(scores.argmax(1) == batch["y"])
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("noise", torch.rand(()))
        return loss


def left(layout: Layout) -> Any:
    """What two steps leave on rank 0, and the number that torch draws next."""
    strategy = {"strategy": make_strategy(layout)} if layout.step == "auto" else {}
    trainer = make_trainer(layout, **strategy, max_steps=2, max_epochs=1)
    module: Any = models.build(Leaves, torch.float64)
    trainer.fit(module, make_loader(models.vectors((8, 8), torch.float64)))
    return module.mean, module.losses, module.count, float(trainer.callback_metrics["accuracy_epoch"])


@pytest.mark.parametrize("layout", covered([P1, P2, REPLICATE], by=[P1, P2]), ids=str)
def test_a_dry_run_leaves_nothing(pool: Pool, layout: Layout) -> None:
    (expected,) = pool.run(1, left, Layout())
    made = pool.run(layout.world_size, left, layout)[0]
    assert_close({"mean": made[0]}, {"mean": expected[0]}, 1e-12)
    assert made[1] == pytest.approx(expected[1], rel=1e-12) and made[2:] == expected[2:]

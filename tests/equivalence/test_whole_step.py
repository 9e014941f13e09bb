"""`step="batch"`: the step runs once on the whole batch, so that it equals one process whatever it computes."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.passes import After, Before, BeforeAndAfter, ChosenAndRejected
from tests.harness import models
from tests.harness.models import NUM_BLOCKS, WIDTH, Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    Training,
    assert_close,
    fit,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
)

P2 = Layout(2, 1, 1, step="batch")
W2 = Layout(2, 2, 1, step="batch")
P4 = Layout(4, 1, 1, step="batch")
CUBE = Layout(1, 1, 1, cube=(2, 1, 1), step="batch", schedule="auto")
DATA = Layout(2, 1, 2, step="batch")


class Constant(models.MLP):
    """A sum divided by a constant."""

    def loss(self, batch: Batch) -> Tensor:
        return functional.cross_entropy(self(batch["x"]), batch["y"], reduction="sum") / 32


class Contrastive(models.MLP):
    """Each sample against all others of the batch."""

    def loss(self, batch: Batch) -> Tensor:
        scores = self(batch["x"])
        return functional.cross_entropy(scores @ scores.T, torch.arange(len(scores)))


class Whitened(models.MLP):
    """Advantages whitened over the batch, without a gradient, and the hardest half of the samples."""

    def loss(self, batch: Batch) -> Tensor:
        losses = functional.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
        reward = batch["x"].sum(1)
        advantage = (reward - reward.mean()) / reward.std()
        return (losses * advantage).mean() + losses.topk(len(losses) // 2).values.mean()


class TwoDenominators(models.MLP):
    """A mean over samples, and one over those of a class, of which some micro-batches have none."""

    def loss(self, batch: Batch) -> Tensor:
        scores = self(batch["x"])
        chosen = batch["y"] == 0
        return functional.cross_entropy(scores, batch["y"]) + scores[chosen].square().sum() / chosen.sum().clamp(min=1)


class Normalized(models.MLP):
    """BatchNorm in front of the stack and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.embedding(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.after(x))


class Counts(models.MLP):
    """A counter, a queue in a buffer, a batch that is changed in place, and exp(loss) logged."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, models.CLASSES))
        self.steps = 0

    def loss(self, batch: Batch) -> Tensor:
        batch["x"].mul_(0.5)
        self.steps += 1
        scores = self(batch["x"])
        loss = functional.cross_entropy(scores, batch["y"]) + (scores.mean(0) - self.queue).square().mean()
        self.queue = torch.cat([self.queue[1:], scores.detach().mean(0, keepdim=True)])
        self.log("perplexity", loss.detach().exp())
        return loss * self.steps


class GatedBlock(models.Block):
    """Gets a gate for each sample, and a table with as many rows as the batch has samples; stores two values."""

    def forward(self, x: Tensor, gate: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        self.size = x.square().mean(1)
        self.auxiliary = x.square().mean()
        return super().forward(x) * gate[:, None] + table.sum(0)


class Gated(models.MLP):
    """Arguments of blocks with gradients; a table of constant size; values that blocks store."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(NUM_BLOCKS))
        self.gate = nn.Linear(WIDTH, 1)
        self.table = nn.Parameter(torch.full((8, WIDTH), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).sigmoid().squeeze(1)
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, gate, self.table)
        return self.head(x)

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        stored = [block.size.max() + block.auxiliary for block in self.blocks]
        return loss + 0.1 * torch.stack(stored).mean()


class ScaledBlock(models.Block):
    """Stores a number that is 0 for all samples until it has trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.auxiliary = self.scale * x.square().mean()
        return super().forward(x)


class Scaled(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(NUM_BLOCKS))

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        return loss + 10 * torch.stack([block.auxiliary for block in self.blocks]).sum()


class Unused(models.MLP):
    """The loss doesn't need the stack, so that blocks get no gradient."""

    def loss(self, batch: Batch) -> Tensor:
        self(batch["x"])
        return functional.cross_entropy(self.head(self.embedding(batch["x"])), batch["y"])


class Injects(models.MLP):
    """A loss that is injected in front of the stack, over all samples."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        x = models.Auxiliary.apply(x, x.square().mean(0).max())  # type: ignore[no-untyped-call]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class CountsDepth(models.MLP):
    """A number that a `finally` puts back, also when a dry run is unwound."""

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        try:
            return super().forward(x)
        finally:
            self.depth -= 1

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) * (2 + self.depth)


class Hidden(models.HuggingFace):
    """The loss needs the hidden states in front of each block."""

    def loss(self, batch: Batch) -> Tensor:
        output = self.model(**batch, output_hidden_states=True)
        states = torch.stack(output.hidden_states)
        return output.loss + 0.1 * states.std(1).mean()


def hidden() -> Any:
    return Hidden(models.llama().model)


def quietly(training: Training, layout: Layout) -> Outcome:
    warnings.filterwarnings("ignore", message="blocks return or store a tensor of the shape")
    return fit(training, layout)


STEPS: list[Callable[[], Any]] = [
    Constant, Contrastive, Whitened, TwoDenominators, Normalized, Counts, Gated, Scaled, models.Skip, After, Before,
    BeforeAndAfter, ChosenAndRejected, models.gpt2, models.llama, hidden,
]  # fmt: skip


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


FURTHER: list[Any] = [
    models.Frozen, models.Regularised, models.SharesOutside, models.SharesInside, Unused, Injects, CountsDepth,
]  # fmt: skip
CASES = [(model, layout) for model in STEPS for layout in (P2, W2, P4)]
CASES += [(model, CUBE) for model in STEPS if model is not hidden]  # what registered blocks make is in parts
CASES += [(model, P2) for model in FURTHER]
CASES += [(model, DATA) for model in (models.MLP, models.Skip, After, ChosenAndRejected)]  # means over samples


COVERED = [(Gated, P2), (BeforeAndAfter, P2), (ChosenAndRejected, W2)]
COVERED += [(Injects, P2), (CountsDepth, P2), (After, DATA)]
# test_step_auto runs the other losses.


@pytest.mark.parametrize(("model", "layout"), covered(CASES, by=COVERED), ids=name_of)
def test_equals_one_process(pool: Pool, model: Any, layout: Layout) -> None:
    is_text = model in (models.gpt2, models.llama, hidden)
    batches = partial(models.padded, (8, 8, 6), (8,)) if is_text else partial(models.vectors, (8, 8, 6))
    training = Training(model, batches, dtype=torch.float64, steps=3)
    outcome = merge(pool.run(layout.world_size, quietly, training, layout), layout)
    expected = plain(pool, training)
    tolerance = 1e-6 if is_text else 1e-12  # norms and losses of transformers compute in fp32
    assert outcome.losses == pytest.approx(expected.losses, rel=tolerance)
    assert_close(outcome.gradients, expected.gradients, tolerance)
    assert_close(outcome.weights, expected.weights, 100 * tolerance)


def test_accumulated_and_clipped(pool: Pool) -> None:
    batches = partial(models.vectors, (8, 6, 8, 5))
    training = Training(Whitened, batches, dtype=torch.float64, steps=2, accumulate=2, clip=0.1)
    outcome = merge(pool.run(2, fit, training, P2), P2)
    expected = plain(pool, training)
    assert outcome.losses == pytest.approx(expected.losses, rel=1e-12)
    assert_close(outcome.weights, expected.weights, 1e-10)


class Evaluates(Contrastive):
    """Metrics that no mean over micro-batches gives."""

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("perplexity", loss.exp())
        self.log("spread", self(batch["x"]).std(0).max(), reduce_fx="max")


def validate(layout: Layout) -> Any:
    strategy = {"strategy": make_strategy(layout)} if layout.world_size > 1 else {}
    trainer = make_trainer(layout, **strategy)
    module = models.build(Evaluates, torch.float64)
    return trainer.validate(module, make_loader(models.vectors((8, 5), torch.float64)), verbose=False)


def test_metrics_of_an_evaluation(pool: Pool) -> None:
    ((expected,),) = pool.run(1, validate, Layout())
    ((made,), *_) = pool.run(2, validate, P2)
    assert made == pytest.approx(expected, rel=1e-12)


class PackedBlock(models.Block):
    def forward(self, x: Tensor, starts: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + 0 * starts.sum()


class Packed(models.MLP):
    """Samples of different lengths in one sequence, with the places where they start."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PackedBlock() for _ in range(NUM_BLOCKS))

    def loss(self, batch: Batch) -> Tensor:
        lengths = batch["y"] + 1
        x = self.embedding(batch["x"].repeat_interleave(lengths, 0))
        starts = functional.pad(lengths.cumsum(0), (1, 0))
        for block in self.blocks:
            x = block(x, starts)
        return self.head(x).square().mean()


def test_packed_samples_are_refused(pool: Pool) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(2, fit, Training(Packed, partial(models.vectors, (8,)), steps=1), P2, timeout=30.0)
    assert "it has no dimension along which it can be cut into micro-batches" in caught.value.first.message
    assert [failure for failure in caught.value.failures if failure.kind == "timed out"] == []


class FailsLater(models.MLP):
    """An error in front of the stack, or behind it, of the second batch."""

    def __init__(self, *, behind: bool = False) -> None:
        super().__init__()
        self.behind = behind

    def loss(self, batch: Batch) -> Tensor:
        if self.global_step and not self.behind:
            raise ValueError("no second batch")
        loss = super().loss(batch)
        if self.global_step:
            raise ValueError("no second batch")
        return loss


@pytest.mark.parametrize("behind", [False, True])
def test_an_error_of_the_step_ends_all_ranks(pool: Pool, behind: bool) -> None:
    training = Training(partial(FailsLater, behind=behind), partial(models.vectors, (8, 8)), steps=2)
    with pytest.raises(RunFailed, match="ValueError: no second batch") as caught:
        pool.run(2, fit, training, P2, timeout=30.0)
    assert [failure for failure in caught.value.failures if failure.kind == "timed out"] == []


class ChangesArgument(models.MLP):
    """The step changes what it has passed to the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        given = x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        given.add_(1)
        return self.head(x)


class FrozenChangesArgument(models.Frozen, ChangesArgument):
    """The same without a gradient in front of the stack."""


class CountingBlock(models.Block):
    def forward(self, x: Tensor, samples: int) -> Tensor:  # type: ignore[override]
        return super().forward(x) + x.sum(0) / samples


class PassesCount(models.MLP):
    """Blocks get the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, len(x))
        return self.head(x)


class ScalingBlock(models.Block):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * table.mul_(0.9)


class SharesTable(models.MLP):
    """Blocks change a table of all samples in place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScalingBlock() for _ in range(NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x, table = self.embedding(x), torch.ones(WIDTH, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, table)
        return self.head(x)


class InjectsTwice(models.MLP):
    """A loss injected in front of the stack, and a skip past it: its backward runs from both."""

    def forward(self, x: Tensor) -> Tensor:
        first = x = models.Auxiliary.apply(self.embedding(x), self.embedding.weight.square().sum())  # type: ignore
        for block in self.blocks:
            x = block(x)
        return self.head(x + first)


REFUSED = [
    (ChangesArgument, "(8, 16) in place that it has passed to the blocks"),
    (FrozenChangesArgument, "(8, 16) in place that it has passed to the blocks"),
    (PassesCount, "the blocks get the number 8 with the whole batch, and 3 with 38% of its samples"),
    (SharesTable, "a block changes an argument of the shape (16,) in place"),
    (InjectsTwice, "Auxiliary in the step's code outside the stack: the backward adds a gradient of its own"),
]


@pytest.mark.parametrize(("model", "message"), covered(REFUSED, by=[REFUSED[0], *REFUSED[2:]]), ids=name_of)
def test_what_cannot_be_right_is_refused(pool: Pool, model: Any, message: str) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(2, fit, Training(model, partial(models.vectors, (8,)), steps=1), P2, timeout=30.0)
    assert message in caught.value.first.message
    assert [failure for failure in caught.value.failures if failure.kind == "timed out"] == []


def recomputed(training: Training, layout: Layout) -> Outcome:
    callback = OutcomeCallback()
    strategy = make_strategy(layout, recompute="blocks")
    trainer = make_trainer(layout, strategy=strategy, max_steps=training.steps, callbacks=[callback])
    trainer.fit(models.build(training.model, training.dtype), make_loader(training.share(0, 1)))
    return callback.outcome


def test_blocks_are_recomputed(pool: Pool) -> None:
    training = Training(Contrastive, partial(models.vectors, (8, 8, 8, 8)), dtype=torch.float64, steps=4)
    outcome = merge(pool.run(2, recomputed, training, P2), P2)
    assert_close(outcome.weights, plain(pool, training).weights, 1e-9)

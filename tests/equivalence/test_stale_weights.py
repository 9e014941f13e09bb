"""Layers keep no copy of a weight from before an optimizer step, and gather no more than two weights ahead.

Fused optimizers write into parameters without raising their version, so that a version can't tell a new value.
"""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.tensor_parallel.weights import ShardedWeight, StageWeights
from tests.harness import models
from tests.harness.models import Batch
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Outcome, Training, assert_bit_equal, assert_close, fit, merge, run
from tests.strategy.odd_models import activation_checkpointed

KINDS: dict[str, Callable[[], Any]] = {}


def kind(factory: type[models.Trained]) -> type[models.Trained]:
    """A model of which each way of keeping weights has a case."""
    KINDS[factory.__name__] = factory
    return factory


@kind
class Forgetful(models.MLP):
    """Keeps nothing from one step to the next."""


class KeepingBlock(models.Block):
    """Keeps its last output, and so its graph, in which a weak reference could find old weights."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        KEPT[self] = y
        return y


KEPT: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()


@kind
class Keeping(models.MLP):
    """Keeps the last loss, too."""

    block: type[models.Block] = KeepingBlock

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.__class__ = self.block

    def loss(self, batch: Batch) -> Tensor:
        self.kept = super().loss(batch)
        return self.kept


class CheckpointedBlock(models.Block):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@kind
class Checkpointed(Keeping):
    """Blocks are recomputed, for which their weights are gathered again."""

    block = CheckpointedBlock


class RepeatingBlock(models.Block):
    """Where it is a stage's only block, its weight follows itself: it is gathered ahead, too, for the next batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.repeated(functional.gelu(self.repeated(self.norm(x))))


@kind
class Repeating(Keeping):
    block = RepeatingBlock

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.repeated = torch.nn.Linear(models.WIDTH, models.WIDTH)
            del block.up, block.down


@kind
class Compiled(models.MLP):
    """Compiled code takes the weights' values, not the parameters."""

    def __init__(self) -> None:
        super().__init__()
        warnings.simplefilter("ignore")  # torch's own, and that cubes run these blocks as written
        for block in self.blocks:
            block.compile(backend="aot_eager")


@kind
class Changed(Keeping):
    """A hook writes into weights after each step, without telling torch either."""

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.blocks.parameters():
            parameter.data.mul_(0.9)


def fused(name: str, optimizer: str, *, tells: bool) -> Any:
    """A model with a fused optimizer; if it `tells`, it raises the versions of the weights that it writes."""
    model = KINDS[name]()

    def configure_optimizers() -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1, fused=True)
        if tells:
            made.register_step_post_hook(raise_versions)
        return made

    model.configure_optimizers = configure_optimizers
    return model


def raise_versions(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    increment_version([parameter for parameter in parameters if not parameter.is_meta])


def assert_no_old_weight_is_used(
    pool: Pool, layout: Layout, name: str, optimizer: str, precision: Any, accumulate: int = 1, off: str = ""
) -> None:
    """The training is the same to the last bit, whether the optimizer raises versions or not."""
    batches = partial(models.vectors, (8,) * 3 * accumulate)
    telling, silent = (
        merge(
            pool.run(
                layout.world_size,
                fit_without,
                off,
                Training(
                    partial(fused, name, optimizer, tells=tells),
                    batches,
                    steps=3,
                    precision=precision,
                    accumulate=accumulate,
                ),
                layout,
            ),
            layout,
        )
        for tells in (True, False)
    )
    assert_bit_equal(silent.weights, telling.weights)


def fit_without(off: str, training: Training, layout: Layout) -> Outcome:
    """Train with one of the places switched off at which layers drop what they have kept of weights."""
    with pytest.MonkeyPatch.context() as patch:
        if off == "versions of batches":
            patch.setattr(WeightGradientQueue, "version", property(lambda _: 0, lambda *_: None), raising=False)
        if off == "dropping weights gathered ahead":
            patch.setattr(StageWeights, "_drop_gathered", lambda _: None)
            patch.setattr(StageWeights, "drop_transfers", lambda _: None)
        return fit(training, layout)


ZERO_BUBBLE = Layout(2, 1, 1, "hanayo-zb")
LAYOUTS = [
    Layout(2, 1, 1), Layout(2, 2, 1), ZERO_BUBBLE, Layout(2, 1, 1, "zb-h1"), Layout(2, 1, 2), Layout(cube=(1, 2, 1)),
    Layout(cube=(2, 1, 1)), Layout(2, 1, 1, "hanayo-zb", cube=(2, 1, 1)), Layout(2, 1, 1, cube=(1, 2, 1)),
]  # fmt: skip
CUBE, ONE_BLOCK = LAYOUTS[7], Layout(2, 2, 1, cube=(2, 1, 1))
OPTIMIZERS = ["Adam", "AdamW", "SGD", "Adagrad"]


@pytest.mark.parametrize(
    ("layout", "name", "optimizer", "precision"),
    covered(
        product([*LAYOUTS, ONE_BLOCK], KINDS, ["AdamW"], ["bf16-mixed"]),
        by=[(ZERO_BUBBLE, "Keeping", "AdamW", "bf16-mixed")],
    ),
    ids=str,
)
def test_fused_optimizers_leave_no_old_weight(
    pool: Pool, layout: Layout, name: str, optimizer: str, precision: str
) -> None:
    assert_no_old_weight_is_used(pool, layout, name, optimizer, precision)


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("layout", [ZERO_BUBBLE, CUBE], ids=str)
def test_all_fused_optimizers(pool: Pool, layout: Layout, optimizer: str, precision: str) -> None:
    for name in KINDS:
        assert_no_old_weight_is_used(pool, layout, name, optimizer, precision, accumulate=2)


@pytest.mark.parametrize(
    ("layout", "name", "off"),
    [
        (ZERO_BUBBLE, "Keeping", "versions of batches"),
        pytest.param(ONE_BLOCK, "Repeating", "dropping weights gathered ahead", marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_old_weights_would_be_seen(pool: Pool, layout: Layout, name: str, off: str) -> None:
    with pytest.raises(AssertionError, match="not bit-equal"):
        assert_no_old_weight_is_used(pool, layout, name, "AdamW", "bf16-mixed", off=off)


@pytest.mark.parametrize(
    "layout", covered([Layout(cube=(2, 1, 1)), Layout(2, 1, 1, cube=(2, 1, 1))], by=[Layout(cube=(2, 1, 1))]), ids=str
)
def test_no_old_shard_is_used(pool: Pool, layout: Layout) -> None:
    model = partial(fused, "Checkpointed", "AdamW", tells=False)
    training = Training(model, partial(models.vectors, (8, 8, 8)), torch.float64, steps=3)
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, 1e-9)


def weights_ahead(model: Any, layout: Layout) -> tuple[int, int, Outcome]:
    """The maximum of weights that one stage had gathered ahead, and the number left after the training."""
    original, most = StageWeights.prefetch_after, 0
    stages: set[StageWeights] = set()

    def num_ahead() -> int:
        return sum(len(stage._gathered) for stage in stages)

    def counted(stage: StageWeights, weight: ShardedWeight, dtype: torch.dtype) -> None:
        nonlocal most
        stages.add(stage)
        original(stage, weight, dtype)
        most = max(most, num_ahead())

    StageWeights.prefetch_after = counted  # type: ignore[method-assign]
    try:
        outcome = fit(Training(model, partial(models.windows, (8, 8)), torch.float64, steps=2), layout)
    finally:
        StageWeights.prefetch_after = original  # type: ignore[method-assign]
    return most, num_ahead(), outcome


@pytest.mark.thorough
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_gather_no_more_than_two_weights_ahead(pool: Pool, reentrant: bool) -> None:
    model, layout = partial(activation_checkpointed, "gpt2", reentrant), Layout(cube=(2, 1, 1))
    ranks = pool.run(2, weights_ahead, model, layout)
    assert [(most, left) for most, left, _ in ranks] == [(2, 0)] * 2
    plainly = Training(model, partial(models.windows, (8, 8)), torch.float64, steps=2)
    assert_close(merge([outcome for *_, outcome in ranks], layout).weights, plain(pool, plainly).weights, 1e-6)

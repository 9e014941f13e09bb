"""Blocks that run again in the backward give the same weights to the last bit, and hold less in between."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional

from lightning_hanayo.errors import HanayoError, PeerFailed, UnsupportedError
from lightning_hanayo.planner.layout import choose
from lightning_hanayo.strategy.setup.plan import num_recomputed
from tests.harness import models
from tests.harness.live_bytes import Live
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    OutcomeCallback,
    assert_bit_equal,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
)

Recompute = Any


class DroppingBlock(models.Block):
    num_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        DroppingBlock.num_runs += 1
        return x + functional.dropout(super().forward(x), 0.25, self.training)


class Dropping(models.MLP):
    """Dropout in blocks, and in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(models.NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(functional.dropout(x, 0.1, self.training))


def dropping_gpt2() -> LightningModule:
    module: Any = models.gpt2(heads=4)
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.2
    return module


def every_second(name: str, block: nn.Module) -> bool:
    return int(name.rpartition(".")[2]) % 2 == 0


def train(layout: Layout, model: Callable[[], LightningModule], recompute: Recompute, precision: str) -> Outcome:
    """This rank's outcome."""
    callback = OutcomeCallback()
    is_text = model is not Dropping
    weight = "tokens" if is_text else "samples"
    trainer = make_trainer(
        layout,
        strategy=make_strategy(layout, recompute=recompute, loss_weight=weight),
        max_epochs=1,
        callbacks=[callback],
        precision=precision,
    )
    batches = models.padded((8, 8), lengths=(16,)) if is_text else models.vectors((8, 8))
    own = slice(data_rank(layout), None, layout.data)
    shares = [{name: value[own] for name, value in batch.items()} for batch in batches]
    trainer.fit(models.build(model), make_loader(shares))
    return callback.outcome


LAYOUTS = [
    Layout(2, 1, 1),
    Layout(data=2),
    Layout(2, 2, 1, "hanayo-zb"),
    Layout(2, 1, 1, "1f1b"),
    Layout(cube=(2, 1, 1)),
    Layout(2, 1, 1, "hanayo-zb", cube=(1, 2, 1)),
    Layout(2, 1, 1, cube=(1, 1, 2), outside="replicate"),
]
WAYS: list[Recompute] = ["blocks", 1, every_second]
TRAININGS = [(Dropping, "32-true"), (dropping_gpt2, "bf16-mixed")]
PAIRS = [
    *product(LAYOUTS, WAYS, TRAININGS),
    *((layout, "attention", TRAININGS[1]) for layout in LAYOUTS),
]
COVER = [
    (LAYOUTS[2], "blocks", TRAININGS[0]),
    (LAYOUTS[3], "attention", TRAININGS[1]),
]


def shown(value: Any) -> str:
    """A name that is the same in all processes of a test run."""
    return "-".join(map(shown, value)) if isinstance(value, tuple) else getattr(value, "__name__", str(value))


@pytest.mark.parametrize(("layout", "how", "training"), covered(PAIRS, by=COVER), ids=shown)
def test_bit_equal(pool: Pool, layout: Layout, how: Recompute, training: Any) -> None:
    model, precision = training
    kept = pool.run(layout.world_size, train, layout, model, "none", precision)
    again = pool.run(layout.world_size, train, layout, model, how, precision)
    ours, expected = (merge(ranks, layout) for ranks in (again, kept))
    assert ours.losses == expected.losses
    assert_bit_equal(ours.gradients, expected.gradients)
    assert_bit_equal(ours.weights, expected.weights)


def cost(layout: Layout, recompute: Recompute) -> tuple[int, int]:
    """How often this rank's blocks ran in a batch, and the most bytes that it made and held."""
    trainer = make_trainer(layout, strategy=make_strategy(layout, recompute=recompute), max_steps=1)
    DroppingBlock.num_runs = 0
    with Live() as live:
        trainer.fit(models.build(Dropping), make_loader(models.vectors((4096,))))
    return DroppingBlock.num_runs, live.peak


@pytest.mark.parametrize("schedule", covered(["auto", "hanayo-zb"], by=["hanayo-zb"]))
def test_each_block_runs_twice_and_keeps_its_input(pool: Pool, schedule: str) -> None:
    """With the backward in two parts, too: the part for weights doesn't run it again, but has kept all it needs."""
    layout = Layout(2, 1, 1, schedule)
    whole, some, blocks = (pool.run(2, cost, layout, how) for how in ("none", 1, "blocks"))
    for (runs, kept), (_, half), (again, peak) in zip(whole, some, blocks, strict=True):
        assert (
            again == runs + 4 * 4
        )  # once more for each block of a rank and micro-batch; the first batch's proof aside
        if schedule == "auto":
            assert peak < half < kept and peak < 0.8 * kept


def test_ranks_with_fewer_micro_batches_recompute_less() -> None:
    """1F1B holds 4, 3, 2 and 1 micro-batches on 4 ranks. Rank 0 keeps what 2 of 6 blocks need: 8 in all."""
    layout = choose(num_ranks=4, num_blocks=24, num_microbatches=8, schedule="1f1b")
    assert layout.simulate().peak_activations == (4, 3, 2, 1)
    assert [num_recomputed(4, 6, layout, rank) for rank in range(4)] == [4, 4, 2, 0]
    assert [num_recomputed(9, 6, layout, rank) for rank in range(4)] == [6, 6, 6, 6]


class Counts(models.Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Counting(models.MLP):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counts() for _ in range(models.NUM_BLOCKS))


def refused(model: type[LightningModule], recompute: Recompute) -> str:
    layout = Layout(2)
    trainer = make_trainer(layout, strategy=make_strategy(layout, recompute=recompute), max_steps=1)
    with pytest.raises((UnsupportedError, PeerFailed)) as error:
        trainer.fit(models.build(model), make_loader(models.vectors((8,))))
    return str(error.value)


@pytest.mark.parametrize(
    ("model", "recompute", "message"),
    [
        (Counting, "blocks", "its forward changes the buffer calls"),
        (Dropping, "attention", "has no module inside whose class is named after attention"),
    ],
)
def test_what_would_be_wrong_is_refused(
    pool: Pool, model: type[LightningModule], recompute: Recompute, message: str
) -> None:
    for error in pool.run(2, refused, model, recompute):
        assert message in error


@pytest.mark.parametrize("value", ["all", -1, 1.5, None])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(HanayoError, match="recompute="):
        make_strategy(Layout(2), recompute=value)

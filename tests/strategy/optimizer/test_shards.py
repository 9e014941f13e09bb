"""An optimizer sharded over data ranks gives the weights of one that isn't, and its states take 1/D of the memory."""

import warnings
from functools import partial
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from lightning_hanayo.errors import PeerFailed, UnsupportedError
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    OutcomeCallback,
    assert_bit_equal,
    assert_close,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    merge_owned,
    own_weights,
)

STEPS = 4


class Adam(models.MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(accumulate: int, dtype: torch.dtype) -> list[models.Batch]:
    found = models.vectors((12,) * STEPS * accumulate)
    return [{"x": batch["x"].to(dtype), "y": batch["y"]} for batch in found]


def train(
    layout: Layout,
    *,
    sharded: bool,
    reads: bool = False,
    accumulate: int = 1,
    clip: float | None = None,
    dtype: torch.dtype = torch.float64,
    masters: bool = False,
    averages: bool = False,
) -> tuple[dict[str, Tensor], int]:
    """This rank's weights, and the bytes of its optimizer's states. `reads`: whether a callback reads gradients."""
    warnings.filterwarnings("ignore", message=".*isn't known to work on each")
    options: dict[str, Any] = {"master_weights": "fp32"} if masters else {}
    callbacks: list[Any] = [OutcomeCallback()] if reads else []
    average = EMAWeightAveraging(decay=0.5) if averages else None
    trainer = make_trainer(
        layout,
        strategy=make_strategy(layout, shard_optimizer=sharded, **options),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        callbacks=[*callbacks, *([average] if average is not None else [])],
        precision="bf16-true" if masters else "64-true" if dtype == torch.float64 else "32-true",
    )
    module = models.build(Adam, torch.bfloat16 if masters else dtype)
    shares = [
        {name: value[data_rank(layout) :: layout.data] for name, value in batch.items()}
        for batch in batches(accumulate, torch.bfloat16 if masters else dtype)
    ]
    trainer.fit(module, make_loader(shares))
    shards = trainer.strategy.session.steps.shards
    assert (shards is not None) == sharded
    if shards is not None:
        assert shards.scatters != reads
    states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    return own_weights(module, trainer), sum(value.nbytes for value in states)


def merged(layout: Layout, ranks: list[tuple[dict[str, Tensor], int]]) -> dict[str, Tensor]:
    """The weights, on which all data ranks agree."""
    replicas = [merge_owned([ranks[rank][0] for rank in group]) for group in layout.topology.groups("pipe")]
    for replica in replicas[1:]:
        assert_bit_equal(replica, replicas[0])
    return replicas[0]


TWO = [Layout(data=2), Layout(2, 1, 2), Layout(1, 1, 2, cube=(2, 1, 1)), Layout(2, 2, 2, "hanayo-zb")]
WAYS: list[dict[str, Any]] = [
    {},
    {"reads": True, "accumulate": 2},
    {"accumulate": 2, "dtype": torch.float32},
    {"masters": True},
    {"averages": True},
]


@pytest.mark.parametrize(
    ("layout", "how"),
    covered(
        product(TWO, WAYS),
        by=[(TWO[0], WAYS[0]), (TWO[1], WAYS[3])],
    ),
    ids=str,
)
def test_two_data_ranks_are_bit_equal(pool: Pool, layout: Layout, how: dict[str, Any]) -> None:
    whole = pool.run(layout.world_size, partial(train, layout, sharded=False, **how))
    sharded = pool.run(layout.world_size, partial(train, layout, sharded=True, **how))
    assert_bit_equal(merged(layout, sharded), merged(layout, whole))
    for (_, own), (_, all_of_them) in zip(sharded, whole, strict=True):
        assert own <= 0.6 * all_of_them


THREE = [Layout(data=3), Layout(2, 1, 2), Layout(1, 1, 2, cube=(1, 2, 1)), Layout(1, 1, 3, cube=(1, 1, 2))]
CLIPPED: list[dict[str, Any]] = [{"clip": 0.1}, {"clip": 0.1, "accumulate": 2, "reads": True}]


@pytest.mark.thorough
@pytest.mark.parametrize(("layout", "how"), [*product(THREE, CLIPPED)], ids=str)
def test_other_orders_of_sums_are_equal(pool: Pool, layout: Layout, how: dict[str, Any]) -> None:
    """Three ranks are added in another order, and a norm over other parts. 16, 32 and 5 rows are uneven parts."""
    whole = pool.run(layout.world_size, partial(train, layout, sharded=False, **how))
    sharded = pool.run(layout.world_size, partial(train, layout, sharded=True, **how))
    assert_close(merged(layout, sharded), merged(layout, whole), 1e-12)


def save(
    layout: Layout, folder: str, *, sharded: bool, masters: bool, save_full: bool, resumes: bool
) -> dict[str, Tensor]:
    """Train an epoch, the second one from a checkpoint if it `resumes`, and save; this rank's weights."""
    trainer = make_trainer(
        layout,
        strategy=make_strategy(
            layout, shard_optimizer=sharded, save_full=save_full, master_weights="fp32" if masters else None
        ),
        max_epochs=2 if resumes else 1,
        precision="bf16-true" if masters else "64-true",
    )
    dtype = torch.bfloat16 if masters else torch.float64
    module = models.build(Adam, dtype)
    shares = [
        {name: value[data_rank(layout) :: layout.data] for name, value in batch.items()} for batch in batches(1, dtype)
    ]
    trainer.fit(module, make_loader(shares), ckpt_path=f"{folder}/first.ckpt" if resumes else None, weights_only=False)
    trainer.save_checkpoint(f"{folder}/{'second' if resumes else 'first'}.ckpt")
    return own_weights(module, trainer)


OTHERS = [
    (Layout(2, 1, 2), True, Layout(2, 1, 2), True),
    (Layout(data=3), True, Layout(2, 1, 2), False),
    (Layout(2, 1, 2), False, Layout(1, 1, 2, cube=(2, 1, 1)), True),
    (Layout(1, 1, 2, cube=(1, 2, 1)), True, Layout(pipe=2), False),
]
KINDS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("runs", "kind"),
    [*product(OTHERS, KINDS)],
    ids=str,
)
def test_any_layout_reads_its_checkpoints(pool: Pool, tmp_path: Any, runs: Any, kind: Any) -> None:
    first, is_first_sharded, second, is_second_sharded = runs
    masters, save_full = kind

    def run(layout: Layout, sharded: bool, *, resumes: bool) -> dict[str, Tensor]:
        how = {"sharded": sharded, "masters": masters, "save_full": save_full, "resumes": resumes}
        ranks = pool.run(layout.world_size, partial(save, layout, str(tmp_path), **how))
        return merged(layout, [(weights, 0) for weights in ranks])

    run(first, is_first_sharded, resumes=False)
    resumed = run(second, is_second_sharded, resumes=True)
    run(first, False, resumes=False)
    assert_close(resumed, run(second, False, resumes=True), 2e-2 if masters else 1e-12)


class Unknown(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class OfUnknownScope(models.MLP):
    def configure_optimizers(self) -> Any:
        return Unknown(self.parameters(), lr=1e-2)


class HooksStep(models.MLP):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer


class ReadsStates(Adam):
    def on_train_end(self) -> None:
        self.optimizers().state_dict()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (OfUnknownScope, "Unknown isn't known to work on each element"),
        (HooksStep, "SGD has a hook on its steps"),
        (ReadsStates, "only the states of what it updates"),
    ],
)
def test_what_rows_would_make_wrong_is_refused(pool: Pool, model: type[LightningModule], message: str) -> None:
    for error in pool.run(2, partial(refused, model)):
        assert message in error


def refused(model: type[LightningModule]) -> str:
    """The error of a run."""
    layout = Layout(data=2)
    trainer = make_trainer(layout, strategy=make_strategy(layout, shard_optimizer=True), max_steps=1)
    with pytest.raises((UnsupportedError, PeerFailed)) as error:
        trainer.fit(models.build(model), make_loader(batches(1, torch.float32)))
    return str(error.value)


class Traced(Adam):
    """Notes when the ranks above pipeline rank 0 wait for the parameters of their stages."""

    events: ClassVar[list[str]] = []

    def on_fit_start(self) -> None:
        pipeline = self.trainer.strategy.pipeline
        shards, stages = pipeline.gradients.shards, pipeline.engine.stages
        finish = shards.finish

        def noted(stage: int | None = None) -> None:
            found = [stage] if stage is not None else list(stages)
            self.events.extend(f"gathered {one}" for one in found if shards._under_way.get(one))
            finish(stage)

        shards.finish = noted
        for stage, run in pipeline.engine.stages.items():
            for kind, name in (("F", "forward"), ("B", "backward")):
                setattr(run, name, partial(self._noted, f"{kind}{stage}", getattr(run, name)))

    def _noted(self, name: str, action: Any, *args: Any) -> Any:
        self.events.append(name)
        return action(*args)


def traced() -> list[str]:
    """What a rank did in two steps."""
    layout = Layout(2, 1, 2, num_microbatches=2)
    trainer = make_trainer(layout, strategy=make_strategy(layout, shard_optimizer=True), max_steps=2)
    Traced.events.clear()
    trainer.fit(models.build(Traced), make_loader(batches(1, torch.float32)))
    return Traced.events


def test_parameters_arrive_behind_forwards_of_earlier_stages(pool: Pool) -> None:
    """Rank 1 waits for those of stage 2 when stage 1 has begun; stages 0 and 3 run on rank 0."""
    for events in pool.run(4, traced)[1::2]:
        second_step = events[events.index("gathered 1") :]
        assert second_step.index("F1") < second_step.index("gathered 2") < second_step.index("F2")


class Stops(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.number:
            raise RuntimeError("the last backward fails")
        return gradient, None


class FailsLate(Adam):
    """Fails in the backward of its first stage, of the last micro-batch, when other stages' gradients are under way."""

    num_steps = 0

    def training_step(self, batch: models.Batch, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return super().training_step({**batch, "x": batch["x"].requires_grad_()}, batch_idx)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Stops.apply(x, self.num_steps == 2))  # type: ignore[no-untyped-call]


def fails() -> str:
    layout = Layout(2, 2, 2, "hanayo-zb", num_microbatches=2)
    trainer = make_trainer(layout, strategy=make_strategy(layout, shard_optimizer=True), max_steps=1)
    with pytest.raises((RuntimeError, PeerFailed)) as error:
        trainer.fit(models.build(FailsLate), make_loader(batches(1, torch.float32)))
    return repr(error.value)


def test_a_failure_while_gradients_are_under_way_ends_the_run(pool: Pool) -> None:
    """Ranks 0 and 2 fail alike, and leave the groups in which they have transfers with each other."""
    errors = pool.run(4, fails)
    assert any("the last backward fails" in error for error in errors[::2])
    assert all("PeerFailed" in error for error in errors[1::2])

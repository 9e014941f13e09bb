"""NaN and infinite gradients never reach the weights: all ranks raise one error that names their origin, or all skip.

step      0    1    2              3
          ok   ok   a NaN on one   as if step 2 had not been, with nonfinite="skip"
                    rank
"""

import re
import warnings
from dataclasses import dataclass, field
from functools import partial
from math import inf, isfinite
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.amp import GradScaler

from lightning_hanayo.errors import NonFiniteError, PeerFailed
from lightning_hanayo.strategy import nonfinite
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, data_rank, make_loader, make_strategy, make_trainer, unguarded
from tests.strategy.nonfinite.spoilt import BATCH, Fault, Spoilt

PIPELINE = Layout(2, 1)
REPLICAS = Layout(2, 1, data=2)
CUBE = Layout(1, 1, cube=(1, 2, 1))
ALONE = Layout(1, 1, num_microbatches=2)


@dataclass
class Run:
    """What is left of a run on one rank: weights and optimizer states after each step and at its end, and its error."""

    error: str = ""
    kept: list[dict[str, Tensor]] = field(default_factory=list)
    skipped: int = 0
    said: list[str] = field(default_factory=list)


class Keeping(Callback):
    """Keeps copies of weights and optimizer states after each batch, and when the run fails."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.run.kept.append(copies(trainer, pl_module))

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.run.kept.append(copies(trainer, pl_module))


def copies(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """Of this rank's parts."""
    with unguarded(trainer):
        own = {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}
        states = enumerate(trainer.optimizers[0].state.values())
        tensors = {f"{i} {k}": v for i, one in states for k, v in one.items() if isinstance(v, Tensor)}
        return own | {name: value.clone() for name, value in tensors.items()}


def train(layout: Layout, fault: Fault, model: Any = Spoilt, **options: Any) -> Run:
    """Train on one rank; `options` are the Trainer's and the strategy's."""
    run = Run()
    for_strategy = {name: options.pop(name) for name in ("nonfinite", "master_weights") if name in options}
    callbacks = [Keeping(run), *options.pop("callbacks", [])]
    strategy = make_strategy(layout, **for_strategy)
    trainer = make_trainer(layout, strategy=strategy, **{"max_steps": 4} | options, callbacks=callbacks)
    batches = [{k: v[data_rank(layout) :: layout.data] for k, v in b.items()} for b in models.vectors((8,) * 8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonfinite, "rank_zero_info", run.said.append)
        try:
            trainer.fit(models.build(partial(model, fault)), make_loader(batches))
        except (NonFiniteError, PeerFailed, RuntimeError) as error:
            run.error = str(error)
    run.skipped = strategy.session.nonfinite.num_skipped
    return run


def run_all(pool: Pool, layout: Layout, fault: Fault, **options: Any) -> list[Run]:
    return pool.run(layout.world_size, partial(train, **options), layout, fault)


def assert_unharmed(runs: list[Run]) -> None:
    """Weights are those after the second step, to the last bit, and so are states, if there are any."""
    for run in runs:
        *_, before, at_end = run.kept
        assert len(run.kept) == BATCH + 1
        assert all(torch.equal(value, before[name]) for name, value in at_end.items())


RANK_0, RANK_1 = r"on rank 0 \(pipeline 0.*\)", r"on rank 1 \(pipeline 1.*\)"
NAMED: dict[str, tuple[Layout, Fault, str]] = {
    "batch": (PIPELINE, Fault("batch"), rf"the input of blocks.0 \(stage 0\): .*, micro-batch 1, {RANK_0}"),
    "first stage": (PIPELINE, Fault("forward", 1), rf"the forward of blocks.1 \(stage 0\), micro-batch 1, {RANK_0}"),
    "second stage": (PIPELINE, Fault("forward", 3), rf"the forward of blocks.3 \(stage 1\), micro-batch 1, {RANK_1}"),
    "third stage": (PIPELINE, Fault("forward", 4), rf"the forward of blocks.4 \(stage 2\), micro-batch 1, {RANK_1}"),
    "last stage": (PIPELINE, Fault("forward", 7), rf"the forward of blocks.7 \(stage 3\), micro-batch 1, {RANK_0}"),
    "infinite": (PIPELINE, Fault("forward", 3, value=inf), rf"blocks.3 .*, {RANK_1}, which made .* infinite"),
    "loss": (PIPELINE, Fault("loss"), rf"the loss: .*, micro-batch 1, {RANK_0}, which made a value that is NaN"),
    "last backward": (PIPELINE, Fault("backward", 6), rf"the backward of .*blocks.7 \(stage 3\), .* 1, {RANK_0}"),
    "backward": (PIPELINE, Fault("backward", 3), rf"the backward of blocks.2 to blocks.3 \(stage 1\), .*{RANK_1}"),
    "first backward": (PIPELINE, Fault("backward", 0), rf"only in gradients .*: blocks.0.*{RANK_0}"),
    "weight": (PIPELINE, Fault("weight", 2), rf"only in gradients of parameters: blocks.2.up.bias, {RANK_1}"),
    "data rank": (REPLICAS, Fault("forward", 3, 1), r"blocks.3 .* on rank 3 \(pipeline 1, data 1\)"),
    "cube": (CUBE, Fault("forward", 3), r"the forward of blocks.3 .* on rank 0 \(pipeline 0, cube \(0, 0, 0\)\)"),
    "one process": (ALONE, Fault("forward", 3), rf"the forward of blocks.3 \(stage 0\), micro-batch 1, {RANK_0}"),
}


@pytest.mark.parametrize("name", covered(NAMED, by={"second stage", "backward", "data rank", "one process"}))
def test_the_error_names_the_origin(pool: Pool, name: str) -> None:
    layout, fault, named = NAMED[name]
    runs = run_all(pool, layout, fault)
    (error,) = {run.error.partition("NonFiniteError: ")[2] or run.error for run in runs}
    assert error.startswith("optimizer step 2: NaN or infinite gradients, ")
    assert re.search(named, error), error
    assert_unharmed(runs)


def test_accumulated_batches_are_found_at_the_step(pool: Pool) -> None:
    for run in run_all(pool, PIPELINE, Fault("forward", 3), accumulate_grad_batches=3):
        assert "optimizer step 0: " in run.error
        assert "micro-batch 1 of batch 2 of those that accumulate, on rank 1" in run.error
        assert all(torch.equal(value, run.kept[0][name]) for name, value in run.kept[-1].items())


class Descent(Spoilt):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Overriding(Spoilt):
    """Calls the closure itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer_closure()
        optimizer.step()


class SearchingLines(Spoilt):
    """Runs the closure twice per step, and changes the weights in between: the NaN comes in the second one."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)


OPTIONS: dict[str, tuple[Layout, dict[str, Any]]] = {
    "clipping": (PIPELINE, {"gradient_clip_val": 0.5}),
    "clipping values": (PIPELINE, {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}),
    "clipping replicas": (REPLICAS, {"gradient_clip_val": 0.5}),
    "momentum": (PIPELINE, {"model": Descent}),
    "override": (PIPELINE, {"model": Overriding}),
    "LBFGS": (ALONE, {"model": SearchingLines}),
    "master weights": (PIPELINE, {"precision": "bf16-true", "master_weights": "fp32"}),
    "bf16": (PIPELINE, {"precision": "bf16-mixed"}),
}


@pytest.mark.parametrize("name", covered(OPTIONS, by={"clipping", "LBFGS"}))
def test_weights_are_unharmed_whatever_steps(pool: Pool, name: str) -> None:
    layout, options = OPTIONS[name]
    runs = run_all(pool, layout, Fault("weight", 2), **options)
    assert all("only in gradients of parameters: blocks.2.up.bias," in run.error for run in runs), runs[0].error
    assert_unharmed(runs)


@pytest.mark.parametrize("layout", covered([PIPELINE, REPLICAS, CUBE, ALONE], by=[REPLICAS]), ids=str)
def test_a_skipped_step_is_as_if_it_had_not_been(pool: Pool, layout: Layout) -> None:
    runs = run_all(pool, layout, Fault("forward", 3), nonfinite="skip")
    for run in runs:
        assert (run.error, run.skipped, len(run.kept)) == ("", 1, 4)
        _, before, after, last = run.kept
        assert all(torch.equal(value, after[name]) for name, value in before.items())
        assert all(value.isfinite().all() for value in last.values())
        assert any(not torch.equal(value, last[name]) for name, value in after.items())
        assert ["optimizer step 2: " in said and "All ranks skip" in said for said in run.said] == [True]


@pytest.mark.thorough
def test_what_is_ignored_spoils_the_weights(pool: Pool) -> None:
    runs = run_all(pool, PIPELINE, Fault("forward", 3), nonfinite="ignore")
    assert [run.error for run in runs] == ["", ""]
    assert any(value.isnan().any() for run in runs for value in run.kept[-1].values())


class Removing(Callback):
    """Removes gradients that have a NaN, as users do."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(pl_module.parameters(), 1.0)
        if not norm.isfinite():
            optimizer.zero_grad()


def test_gradients_that_a_hook_removes_are_no_error(pool: Pool) -> None:
    runs = run_all(pool, PIPELINE, Fault("forward", 3), callbacks=[Removing()])
    assert [run.error for run in runs] == ["", ""]
    assert all(value.isfinite().all() for run in runs for value in run.kept[-1].values())


class Frozen(Spoilt):
    """The first blocks don't train."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        for part in (self.embedding, *self.blocks[:5]):
            part.requires_grad_(False)


@pytest.mark.thorough
def test_a_frozen_block_that_makes_a_nan_is_named(pool: Pool) -> None:
    for run in run_all(pool, PIPELINE, Fault("forward", 1), model=Frozen):
        assert re.search(rf"the forward of blocks.1 \(stage 0\), micro-batch 1, {RANK_0}", run.error), run.error


class LastBlocks(Spoilt):
    """The optimizer doesn't have the first blocks."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([*self.blocks[4:].parameters(), *self.head.parameters()])


@pytest.mark.thorough
@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradients_that_no_optimizer_reads_are_no_error(pool: Pool, clip: float | None) -> None:
    runs = run_all(pool, PIPELINE, Fault("weight", 2), model=LastBlocks, gradient_clip_val=clip)
    assert [run.error for run in runs] == ["", ""]


class Repairing(Spoilt):
    """Clips, and then removes one gradient, which was NaN: by then all are."""

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.blocks[5].up.bias.grad = None


CLIPPED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "some": (LastBlocks, {"gradient_clip_val": 0.5}, rf"parameters: blocks.5.up.bias, {RANK_1}"),
    "repaired": (Repairing, {}, "only in gradients of parameters: blocks"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CLIPPED)
def test_gradients_that_clipping_spoils_are_found_and_those_before_are_named(pool: Pool, name: str) -> None:
    model, options, named = CLIPPED[name]
    runs = run_all(pool, PIPELINE, Fault("weight", 5), model=model, **options)
    assert all(re.search(named, run.error) for run in runs), runs[0].error
    assert_unharmed(runs)


def train_looking_at_no_gradient(layout: Layout, fault: Fault) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        if fault.where == "nowhere":
            patch.delattr(nonfinite.GradientLook, "at")
        return train(layout, fault, gradient_clip_val=0.5)


@pytest.mark.parametrize("where", ["weight", "nowhere"])
def test_one_rank_takes_the_norm_by_which_it_clips(pool: Pool, where: Any) -> None:
    runs = pool.run(1, train_looking_at_no_gradient, ALONE, Fault(where, 5))
    if where == "weight":
        assert "optimizer step 2: NaN or infinite gradients, only in gradients of" in runs[0].error
        assert_unharmed(runs)
    else:
        assert not runs[0].error


class Searched(models.MLP):
    lr = 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def search(layout: Layout) -> float | None:
    """Train at rates up to those that make the weights NaN."""
    warnings.filterwarnings("ignore", message=".*`weights_only` was not set")
    tuner = Tuner(make_trainer(layout, strategy=make_strategy(layout), max_epochs=1))
    rates = {"min_lr": 1e-2, "max_lr": 1e6, "num_training": 30, "early_stop_threshold": None}
    found = tuner.lr_find(models.build(Searched), make_loader(models.vectors((8,) * 40)), **rates)
    assert found is not None and not all(map(isfinite, found.results["loss"]))
    return found.suggestion()


@pytest.mark.thorough
def test_a_search_for_a_learning_rate_may_end_with_nan(pool: Pool) -> None:
    one, other = pool.run(2, search, PIPELINE)
    assert one is not None and one == other


class Fused(Spoilt):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)


def train_with_flags(layout: Layout, fault: Fault, **options: Any) -> Run:
    """As on a GPU, where the optimizer's kernels read the flag."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonfinite, "takes_flag", lambda optimizer: optimizer._step_supports_amp_scaling)
        return train(layout, fault, Fused, **options)


def test_a_fused_optimizer_reads_the_flag_and_the_host_a_step_later(pool: Pool) -> None:
    for run in pool.run(2, train_with_flags, PIPELINE, Fault("weight", 2)):
        assert re.search(
            rf"optimizer step 2: .* only in gradients of parameters: blocks.2.up.bias, {RANK_1}", run.error
        )
        assert len(run.kept) == 4
        _, before, without_step, at_end = run.kept
        for name, value in before.items():
            assert torch.equal(value, without_step[name]) and torch.equal(value, at_end[name]), name


@pytest.mark.thorough
def test_the_last_step_of_a_fused_optimizer_is_read_at_the_end(pool: Pool) -> None:
    runs = pool.run(2, partial(train_with_flags, max_steps=3), PIPELINE, Fault("forward", 3))
    assert all("optimizer step 2: " in run.error for run in runs)


SCALED = {
    "overflow": (Fault("weight", 2, value=inf), ""),
    "loss": (Fault("loss"), "the loss: all blocks' outputs were finite, micro-batch 1, on rank 0"),
    "forward": (Fault("forward", 3), "in the forward of blocks.3 (stage 1), micro-batch 1, on rank 1"),
}


@pytest.mark.parametrize("name", covered(SCALED, by={"overflow", "forward"}))
def test_a_gradient_scaler_skips_what_only_overflows(pool: Pool, name: str) -> None:
    fault, named = SCALED[name]
    runs = run_all(pool, PIPELINE, fault, plugins=[MixedPrecision("16-mixed", "cpu", GradScaler("cpu"))])
    assert all(named in run.error and bool(named) == bool(run.error) for run in runs), runs[0].error
    assert all(value.isfinite().all() for run in runs for value in run.kept[-1].values())


@pytest.mark.thorough
def test_a_loss_scale_that_has_collapsed_is_an_error(pool: Pool) -> None:
    scaler = GradScaler("cpu", init_scale=nonfinite.SMALLEST_SCALE / 2)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    runs = run_all(pool, PIPELINE, Fault("weight", 2, value=inf), plugins=[plugin])
    assert all("NaN or infinite gradients at any loss scale" in run.error for run in runs), runs[0].error


DETECTED = {
    "forward": (PIPELINE, Fault("forward", 3), rf"blocks.3 \(stage 1\), .* 1, {RANK_1}"),
    "backward": (PIPELINE, Fault("backward", 3), r"'_GradientsBackward' returned nan values"),
    "loss": (PIPELINE, Fault("loss"), rf"the loss: .*, micro-batch 1, {RANK_0}"),
    "cube": (CUBE, Fault("forward", 3), r"the forward of blocks.3 .*, micro-batch 1, on rank \d"),
}


def detect(layout: Layout, fault: Fault) -> Run:
    warnings.filterwarnings("ignore", message=".*(detect_anomaly|Anomaly Detection|Error detected in)")
    return train(layout, fault, detect_anomaly=True)


@pytest.mark.parametrize("name", covered(DETECTED, by={"backward"}))
def test_detect_anomaly_blames_the_rank_that_made_the_nan(pool: Pool, name: str) -> None:
    layout, fault, named = DETECTED[name]
    for run in pool.run(layout.world_size, detect, layout, fault):
        assert re.search(named, run.error), run.error

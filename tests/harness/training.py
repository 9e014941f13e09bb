"""Runs a training on a layout in the pool's workers, and compares weights, gradients and losses."""

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_hanayo.partition import guards
from lightning_hanayo.topology import Topology
from tests.harness.models import Batch, build
from tests.harness.pool import Pool


@dataclass(frozen=True)
class Layout:
    """The ranks and the schedule of a run. The default is one process without HanayoStrategy.

    data rank 0:  pipeline rank 0 .. P-1
    data rank 1:  pipeline rank 0 .. P-1
    """

    pipe: int = 1
    waves: int = 1
    data: int = 1
    schedule: str = "hanayo"
    num_microbatches: int = 4
    cube: tuple[int, int, int] = (1, 1, 1)
    outside: str = "share"
    tied_gradients: str = "in_order"
    pairs: bool = False
    weights: str = "microbatch"
    step: str = "microbatch"
    experts: str = "whole"
    recompute: str = "none"
    shard_optimizer: bool = False

    @property
    def topology(self) -> Topology:
        return Topology(data=self.data, pipe=self.pipe, cube=self.cube)

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    def __str__(self) -> str:
        cube = "" if self.cube == (1, 1, 1) else f"-{self.outside}{'x'.join(map(str, self.cube))}"
        cube += "-batch" if self.weights == "batch" else ""
        cube += "-experts" * (self.experts == "cube") + "-recompute" * (self.recompute == "blocks")
        cube += "-sharded" * self.shard_optimizer
        pairs, once = "-pairs" * self.pairs, "-once" * (self.step == "batch")
        return f"{self.schedule}-P{self.pipe}-W{self.waves}-D{self.data}{cube}{pairs}{once}"


@dataclass(frozen=True)
class Training:
    """What is trained, on any layout. `batches()` are the global batches, of all data ranks together."""

    model: Callable[[], LightningModule]
    batches: Callable[[], list[Batch]]
    dtype: torch.dtype = torch.float32
    steps: int = 3
    accumulate: int = 1
    clip: float | None = None
    loss_weight: Literal["samples", "tokens", "sum"] | Callable[[Batch], Any] = "samples"
    precision: Literal["32-true", "bf16-mixed"] = "32-true"

    def share(self, data_rank: int, data_size: int) -> list[Batch]:
        """The batches of one data rank: every `data_size`-th sample of each."""
        cut = slice(data_rank, None, data_size)
        return [
            {
                name: value[cut].to(self.dtype) if value.is_floating_point() else value[cut]
                for name, value in batch.items()
            }
            for batch in self.batches()
        ]


@dataclass
class Outcome:
    """The result of a run, by single-process names: of one rank, or merged over all ranks."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first optimizer step, before clipping
    losses: list[float] = field(default_factory=list)  # one per batch, on pipeline rank 0


class OutcomeCallback(Callback):
    """Copies the weights, gradients and losses of this rank. Parameters of other ranks are on `meta`."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if trainer.global_step == 0:
            with unguarded(trainer):
                self.outcome.gradients = {
                    name: full_copy(trainer, parameter.grad, parameter)
                    for name, parameter in pl_module.named_parameters()
                    if not parameter.is_meta and parameter.grad is not None
                }

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        loss = trainer.callback_metrics.get("train_loss")
        if loss is not None:
            self.outcome.losses.append(float(loss))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.outcome.weights = own_weights(pl_module, trainer)


def own_weights(module: LightningModule, trainer: Trainer | None = None) -> dict[str, Tensor]:
    """Copies of the parameters that this rank owns, or that its cube owns; also after a run."""
    with unguarded(trainer), guards.released(module):
        return {name: full_copy(trainer, p.detach(), p) for name, p in module.named_parameters() if not p.is_meta}


def unguarded(trainer: Trainer | None) -> AbstractContextManager[None]:
    """Inside it, hooks see the parts of parameters and the placeholders that a rank really has."""
    session = getattr(trainer.strategy, "session", None) if trainer is not None else None
    return session.guard.off() if session is not None else nullcontext()


def full_copy(trainer: Trainer | None, value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a parameter's value or gradient, gathered from the ranks of its cube if there is one."""
    session = getattr(trainer.strategy, "session", None) if trainer is not None else None
    cube = session.cube if session is not None else None
    return (value if cube is None else cube.unshard(value, parameter)).clone()


def make_trainer(layout: Layout, loss_weight: Any = "samples", **options: Any) -> Trainer:
    """A Trainer for the layout, without output; its loaders are split over data ranks already."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    is_plain = layout.world_size == 1 and layout.step != "auto"
    strategy = "auto" if is_plain else make_strategy(layout, loss_weight=loss_weight)
    return Trainer(
        **{"accelerator": "cpu", "devices": layout.world_size, "strategy": strategy, "use_distributed_sampler": False}
        | quiet
        | options
    )


def make_strategy(layout: Layout, **options: Any) -> Any:
    """A HanayoStrategy for the layout."""
    from lightning_hanayo import HanayoStrategy

    of_layout: dict[str, Any] = {
        "pipeline_parallel_size": layout.pipe,
        "num_waves": layout.waves,
        "data_parallel_size": layout.data,
        "num_microbatches": layout.num_microbatches,
        "schedule": layout.schedule,
        "cube": layout.cube,
        "cube_outside": layout.outside,
        "tied_gradients": layout.tied_gradients,
        "pairs": layout.pairs,
        "cube_weights": layout.weights,
        "step": layout.step,
        "experts": layout.experts,
        "recompute": layout.recompute,
        "shard_optimizer": layout.shard_optimizer,
    }
    return HanayoStrategy(**of_layout | options)


def make_loader(batches: list[Any]) -> DataLoader:
    """A loader of ready-made batches."""
    return DataLoader(batches, batch_size=None, collate_fn=_ready)  # type: ignore[arg-type]


def _ready(batch: Any) -> Any:
    """Says that the loader gives batches, and not samples."""
    return batch


def data_rank(layout: Layout) -> int:
    """This process's data rank."""
    return layout.topology.coordinates(int(os.environ.get("RANK", 0)))[0]


def fit(training: Training, layout: Layout) -> Outcome:
    """Train on one rank."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")  # the recipe's model has a validation_step
    warnings.filterwarnings("ignore", message=".*will normalise by the mean")  # of a model with BatchNorm
    callback = OutcomeCallback()
    trainer = make_trainer(
        layout,
        "auto" if layout.step == "auto" else training.loss_weight,
        precision=training.precision,
        max_steps=training.steps,
        accumulate_grad_batches=training.accumulate,
        gradient_clip_val=training.clip,
        callbacks=[callback],
    )
    module = build(training.model, training.dtype)
    trainer.fit(module, make_loader(training.share(data_rank(layout), layout.data)))
    return callback.outcome


def run(pool: Pool, training: Training, layout: Layout) -> Outcome:
    """Run a training on all ranks of a layout, and merge their outcomes."""
    return merge(pool.run(layout.world_size, fit, training, layout), layout)


def merge(ranks: list[Outcome], layout: Layout) -> Outcome:
    """Merge the outcomes of all ranks. Each parameter belongs to one pipeline rank; all data ranks must agree on it."""
    replicas = [
        Outcome(
            merge_owned([ranks[rank].weights for rank in group]),
            merge_owned([ranks[rank].gradients for rank in group]),
            ranks[group[0]].losses,
        )
        for group in layout.topology.groups("pipe")
    ]
    for replica in replicas[1:]:
        assert_bit_equal(replica.weights, replicas[0].weights)
        assert_bit_equal(replica.gradients, replicas[0].gradients)
    means = [sum(losses) / len(losses) for losses in zip(*(replica.losses for replica in replicas), strict=True)]
    return Outcome(replicas[0].weights, replicas[0].gradients, means)


def merge_owned(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The union of what the pipeline ranks own, which must not overlap."""
    merged: dict[str, Tensor] = {}
    for rank, part in enumerate(parts):
        duplicates = sorted(part.keys() & merged.keys())
        assert not duplicates, f"pipeline rank {rank} owns what another one owns, too: {duplicates}"
        merged |= part
    return merged


def assert_bit_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Both have the same names, and all values are equal to the last bit."""
    assert sorted(actual) == sorted(expected)
    different = {
        name: (actual[name] - value).abs().max().item()
        for name, value in expected.items()
        if not torch.equal(actual[name], value)
    }
    assert not different, f"not bit-equal, by at most: {different}"


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Both have the same names, and no value differs by more than `tolerance`."""
    assert sorted(actual) == sorted(expected)
    too_large = {name: gap for name, value in expected.items() if not (gap := _gap(actual[name], value)) <= tolerance}
    assert not too_large, f"differ by more than {tolerance:g}: {too_large}"


def assert_same_training(actual: Outcome, expected: Outcome) -> None:
    """In fp32: losses agree to a relative 1e-5, the first step's gradients to 1e-5 of the largest one."""
    assert len(actual.losses) == len(expected.losses)
    for step, (loss, wanted) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        assert abs(loss - wanted) <= 1e-5 * abs(wanted), f"batch {step}: loss {loss}, expected {wanted}"
    largest = max(gradient.abs().max().item() for gradient in expected.gradients.values())
    assert_close(actual.gradients, expected.gradients, 1e-5 * largest)


def _gap(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    return (actual - expected).abs().max().item()

"""A habit: something that users' modules do, and what must come of it on each kind of layout.

    layout     pipeline, waves, cube, or a pipeline of cubes
    outcome    Exact                the same training as in one process
               Refused              an error that names the cause and the way out, at the latest in the first step
               PerMicrobatch        a warning, and the same training as in one process that runs the same micro-batches

A habit is a row of the table in docs/supported/habits.md, which `python -m tests.habits.table` writes.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn

from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchSource
from lightning_hanayo.strategy.batch_split import BatchSplitter
from tests.harness.models import build
from tests.harness.pool import Failure, Pool, RunFailed
from tests.harness.training import Layout, Outcome, OutcomeCallback, make_loader, make_strategy, merge

NUM_STEPS = 3
TOLERANCE = 1e-9
"""relative, in fp64"""
FP32_NORMS = 1e-7
"""for models of transformers with norms that compute in fp32: their rounding depends on the last bits of the input"""

LAYOUTS = {
    "pipeline": Layout(2, 1, 1, step="auto"),
    "waves": Layout(2, 2, 1, step="auto"),
    "cube": Layout(1, 1, 1, cube=(2, 2, 1), step="auto"),
    "both": Layout(2, 1, 1, cube=(1, 2, 1), step="auto"),
}
NUM_MICROBATCHES = 4
"""of each batch, where it has as many samples"""


@dataclass(frozen=True)
class Exact:
    """Losses, gradients, weights, and what the module has `seen`, equal those of one process."""

    def __str__(self) -> str:
        return "exact"


@dataclass(frozen=True)
class Refused:
    """An `UnsupportedError` (or another HanayoError) on some rank, whose message matches `message`; no rank hangs."""

    message: str
    shown: str = ""
    """what the table shows of the message, where `message` has signs of regular expressions"""

    def __str__(self) -> str:
        return "refused"


@dataclass(frozen=True)
class PerMicrobatch:
    """Some rank warns with a message that matches, and all is as in one process that runs the same micro-batches."""

    warning: str

    def __str__(self) -> str:
        return "depends on micro-batches"


HabitOutcome = Exact | Refused | PerMicrobatch
EXACT = Exact()


def everywhere(outcome: HabitOutcome) -> dict[str, HabitOutcome]:
    """The same outcome on all layouts."""
    return dict.fromkeys(LAYOUTS, outcome)


def on(*, pipelines: HabitOutcome, cubes: HabitOutcome) -> dict[str, HabitOutcome]:
    """One outcome on pipelines without a cube, another one on cubes."""
    return {"pipeline": pipelines, "waves": pipelines, "cube": cubes, "both": cubes}


def in_cubes(outcome: HabitOutcome) -> dict[str, HabitOutcome]:
    """An outcome of cubes; on pipelines without one it is exact."""
    return on(pipelines=EXACT, cubes=outcome)


def nothing(*_: Any) -> None:
    """What most scripts do after `fit`."""


@dataclass(frozen=True)
class Habit:
    """One habit. Factories are top-level functions or classes, so that they can be sent to a worker.

    Args:
        name: what users do, in plain English with code in backticks; the row's first cell.
        model: makes the module; weights are those of seed 0. It may fill a dictionary `seen` with numbers that its
            code has read, by any name; they are compared, too.
        batches: makes the batches, of any type, with fp64 numbers; or a dictionary of loaders.
        outcomes: by the name of the layout.
        always_exact: whether it must be exact on all layouts.
        strategy: further options of HanayoStrategy.
        tolerance: relative to the largest value of each kind.
        trainer: makes further options of the Trainer, such as callbacks.
        after: what the script does after `fit`, called with the Trainer, the module and the layout.
    """

    name: str
    model: Callable[[], LightningModule]
    batches: Callable[[], list[Any] | dict[str, Any]]
    outcomes: Mapping[str, HabitOutcome]
    always_exact: bool = False
    strategy: Mapping[str, Any] = field(default_factory=dict)
    trainer: Callable[[], dict[str, Any]] = dict
    tolerance: float = TOLERANCE
    after: Callable[[Trainer, LightningModule, Layout], None] = nothing

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass
class Result:
    """What a run has left: on one rank, or merged over all of them."""

    outcome: Outcome
    seen: dict[str, Any]
    warnings: list[str]


def check(pool: Pool, habit: Habit, layout_name: str) -> None:
    """Run the habit on a layout, and assert its outcome."""
    layout, wanted = LAYOUTS[layout_name], habit.outcomes[layout_name]
    try:
        result = run(pool, habit, layout)
    except RunFailed as failed:
        assert isinstance(wanted, Refused), f"should be {wanted}: {failed.first}"
        assert_refused(failed, wanted)
        return
    assert not isinstance(wanted, Refused), "should be refused, but nothing was raised"
    if isinstance(wanted, PerMicrobatch):
        assert any(re.search(wanted.warning, text) for text in result.warnings), result.warnings
    (expected,) = pool.run(1, fit, habit, Layout(), NUM_MICROBATCHES if isinstance(wanted, PerMicrobatch) else 1)
    assert_equal(result, expected, habit.tolerance)


def run(pool: Pool, habit: Habit, layout: Layout) -> Result:
    """Train on all ranks of a layout, and merge what they have left; `seen` is rank 0's."""
    ranks = pool.run(layout.world_size, fit, habit, layout, timeout=30.0)
    outcome = merge([rank.outcome for rank in ranks], layout)
    return Result(outcome, ranks[0].seen, [text for rank in ranks for text in rank.warnings])


def fit(habit: Habit, layout: Layout, pieces: int = 1) -> Result:
    """Train on one rank. In one process, without HanayoStrategy, the step may be run on `pieces` of each batch."""
    callback = OutcomeCallback()
    options = habit.trainer()
    strategy: Any = "auto"
    if layout.world_size > 1:
        strategy = make_strategy(layout, **habit.strategy)
    trainer = Trainer(
        accelerator="cpu", devices=layout.world_size, strategy=strategy, max_steps=NUM_STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **options | {"callbacks": [*options.get("callbacks", []), callback]},
    )  # fmt: skip
    module = build(habit.model, torch.float64)
    if pieces > 1:
        _run_in_pieces(module, pieces)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        batches = habit.batches()
        trainer.fit(module, make_loader(batches) if isinstance(batches, list) else batches)
        habit.after(trainer, module, layout)
    return Result(callback.outcome, dict(getattr(module, "seen", {})), [str(one.message) for one in caught])


def assert_refused(failed: RunFailed, wanted: Refused) -> None:
    """The first failure is one of ours, its message matches, and no rank waits for its time limit."""
    first: Failure = failed.first
    assert "HanayoError" in first.bases, str(failed)
    assert re.search(wanted.message, first.message), first.message
    assert [failure.rank for failure in failed.failures if failure.kind == "timed out"] == []


def assert_equal(actual: Result, expected: Result, tolerance: float = TOLERANCE) -> None:
    """Losses, gradients, weights and what the module has seen agree, relative to the largest value of each kind."""
    losses, wanted = dict(enumerate(actual.outcome.losses)), dict(enumerate(expected.outcome.losses))
    _assert_near(losses, wanted, "loss", tolerance)
    _assert_near(actual.outcome.gradients, expected.outcome.gradients, "gradient", tolerance)
    _assert_near(actual.outcome.weights, expected.outcome.weights, "weight", tolerance)
    _assert_near(actual.seen, expected.seen, "seen", tolerance)


def _assert_near(actual: Mapping[Any, Any], expected: Mapping[Any, Any], what: str, tolerance: float) -> None:
    assert sorted(actual) == sorted(expected), what
    gaps = {}
    for name, value in expected.items():
        wanted, got = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(actual[name], dtype=torch.float64)
        assert got.shape == wanted.shape, f"{what} {name}: shape {tuple(got.shape)}, expected {tuple(wanted.shape)}"
        gap = (got - wanted).abs().max().item() if wanted.numel() else 0.0
        if not gap <= tolerance * max(1.0, wanted.abs().max().item() if wanted.numel() else 0.0):
            gaps[name] = gap
    assert not gaps, f"{what} differs: {gaps}"


def _run_in_pieces(module: LightningModule, pieces: int) -> None:
    step, log = module.training_step, module.log

    def in_pieces(batch: Any, batch_idx: int) -> Tensor:
        split = BatchSplitter().split(batch, pieces, BatchSource())
        (sizes,), parts = split.sizes.parts, split.pieces
        object.__setattr__(module, "log", lambda *_, **__: None)
        losses = [_loss(step(part, batch_idx)) for part in parts]
        object.__setattr__(module, "log", log)
        mean = torch.stack([loss * (size / sum(sizes)) for loss, size in zip(losses, sizes, strict=True)]).sum()
        module.log("train_loss", mean)
        return mean

    nn.Module.__setattr__(module, "training_step", in_pieces)


def _loss(result: Any) -> Tensor:
    return result["loss"] if isinstance(result, Mapping) else result

"""Where the Trainer's loops are: the batch under way, its number, and its place in an accumulation."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor

_STAGES = {
    RunningStage.TRAINING: "training",
    RunningStage.SANITY_CHECKING: "sanity check",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "prediction",
}


def batch_idx(trainer: "pl.Trainer") -> int:
    """The number of the training batch under way in its epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1


def batch_key(trainer: "pl.Trainer") -> str:
    """Names the batch under way: the same on every layout and after a resume, different for every batch of a run.

    In training: the optimizer step and the batch's place among those that are accumulated for it. In evaluation: the
    step after which it takes place and the batch's number in it.
    """
    stage = trainer.state.stage
    assert stage is not None  # Lightning sets it before it runs a loop
    if trainer.training:
        return f"{stage.value} {trainer.global_step} {batch_idx(trainer) % trainer.accumulate_grad_batches}"
    loop: Any = trainer._active_loop
    return f"{stage.value} {trainer.global_step} {loop.batch_progress.current.ready - 1}"


def continues_accumulation(trainer: "pl.Trainer") -> bool:
    """Whether Lightning won't zero the gradients for this batch."""
    return batch_idx(trainer) % trainer.accumulate_grad_batches != 0


def share_of_step(trainer: "pl.Trainer") -> float:
    """What Lightning multiplies a batch's loss by, because the gradients of several batches accumulate."""
    return 1.0 / trainer.accumulate_grad_batches


def expected_gradient(trainer: "pl.Trainer", loss_scale: Tensor | None) -> float | Tensor:
    """The gradient that Lightning's backward will send into the loss that `training_step` returns.

    With a loss scale a tensor in fp64: whatever dtype the loss has, rounding it there gives what Lightning computes.
    """
    return share_of_step(trainer) if loss_scale is None else loss_scale.double() / trainer.accumulate_grad_batches


def logged_step(trainer: "pl.Trainer") -> int:
    """What loggers get as the step of the batch that ends now, for Lightning's own metrics too."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def step_name(trainer: "pl.Trainer") -> str:
    """The name of the user's step that runs."""
    if trainer.training:
        return "training_step"
    return "test_step" if trainer.testing else "predict_step" if trainer.predicting else "validation_step"


def place_in_run(trainer: "pl.Trainer") -> str:
    """Where the Trainer is, as "step 12 (training)", for reports. For any thread."""
    stage = trainer.state.stage
    name = "set-up" if stage is None else _STAGES[stage]
    return f"step {trainer.global_step} ({name})" if trainer.state.fn == TrainerFn.FITTING else name

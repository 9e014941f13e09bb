"""Runs one batch for a hook: cuts it, runs the pipeline on it, merges results and logs, and defers gradients.

hook  ->  train / evaluate  ->  pipeline  ->  engine  ->  stages  ->  the user's step, once per micro-batch
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_hanayo.runtime import microbatches
from lightning_hanayo.runtime.autograd.deferred_gradients import DeferredGradients
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.batches.containers import children
from lightning_hanayo.runtime.profiling.ranges import is_profiling
from lightning_hanayo.runtime.stages.first_last import find_loss, loss_of
from lightning_hanayo.strategy.lightning import precision, progress, user_hooks
from lightning_hanayo.strategy.lightning.loaders import PlaceholderBatch, source_of
from lightning_hanayo.strategy.lightning.shared_metrics import shared_metrics_of
from lightning_hanayo.strategy.microbatch_steps import MicrobatchSteps
from lightning_hanayo.strategy.session import Session
from lightning_hanayo.strategy.setup.checks import explaining_single_samples, reject_stop
from lightning_hanayo.strategy.user_code.stand_ins import hide_changed

UserStep = Callable[[Any], Any]
"""The user's step on one micro-batch."""


def train(session: Session, trainer: "pl.Trainer", batch: Any, step: UserStep, *, steps: bool) -> Any:
    """Run forward and backward of a batch. Called by all ranks; the batch counts on pipeline rank 0 only.

    `steps` says whether the optimizer steps after this batch; otherwise gradients accumulate.

    Returns:
        What the step returned, merged, with a loss whose backward gives the gradients to the parameters.
    """
    pipeline, loss_scale = session.pipeline, precision.loss_scale(trainer)
    continues, stopping = progress.continues_accumulation(trainer), trainer.should_stop
    scales = user_hooks.may_scale_backward(trainer)
    is_cube = session.topology.replica_size > session.topology.pipe
    runs_once = pipeline.runs_whole_batches and not is_cube
    reads = not runs_once and user_hooks.may_read_gradients(trainer)
    shows_in_steps = reads and not is_cube  # there parameters are whole in a batch only, and old gradients never
    separate = continues and (scales or shows_in_steps)
    deferred = DeferredGradients(
        pipeline.parameters,
        accumulates=continues,
        keeps_old=user_hooks.reads_old_gradients(trainer),
        shows_old=runs_once,
        shows_in_steps=shows_in_steps and pipeline.rank == 0,
        separate=separate,
        scales=scales,
        finish=pipeline.reduce_gradients if separate and steps else None,
        unguarded=session.guard.off,
    )
    result = _run(
        session,
        trainer,
        batch,
        step,
        loss_scale=loss_scale,
        trains=True,
        reduce=steps and not separate,
        on_whole_step=deferred.end_step,
        in_step=deferred.in_step if reads or pipeline.runs_whole_steps else nullcontext,
    )
    deferred.stash()
    if session.topology.replica_size == 1 and find_loss(result) is None:
        return result  # Lightning skips the batch, or refuses what is no loss
    loss = loss_of(result) if pipeline.rank == 0 else torch.zeros((), device=session.device)
    if session.topology.replica_size > 1:
        if trainer.should_stop != stopping:
            reject_stop()
        if user_hooks.reads_step_metrics(trainer, progress.batch_idx(trainer), steps=steps):
            loss = shared_metrics_of(trainer).share_step(loss)
    result = _hand_over(session, result, batch)
    expected = progress.expected_gradient(trainer, loss_scale)
    return _with_loss(result, deferred.surrogate_loss(loss.reshape(()), expected).reshape(loss.shape))


def train_manually(session: Session, trainer: "pl.Trainer", batch: Any, step: UserStep) -> Any:
    """Run a step of manual optimization, with its backwards and optimizer steps. Called by all ranks, which are single.

    Returns:
        What the step returned.
    """
    return _hand_over(session, _run(session, trainer, batch, step, trains=True, has_loss=False), batch)


def average_gradients(session: Session) -> None:
    """After a backward of manual optimization: give all data ranks the mean of their gradients. Called by all."""
    if session.topology.data > 1:
        session.pipeline.reduce_gradients()
        trained = [parameter for parameter in session.pipeline.parameters if parameter.requires_grad]
        for gradient in (parameter.grad for parameter in trained if parameter.grad is not None):
            gradient.div_(session.topology.data)


def evaluate(session: Session, trainer: "pl.Trainer", batch: Any, step: UserStep) -> Any:
    """Run the forward of a batch. Called by all ranks; returns the merged results, or what stands for them."""
    return _hand_over(session, _run(session, trainer, batch, step, trains=False), batch)


def _run(
    session: Session,
    trainer: "pl.Trainer",
    batch: Any,
    step: UserStep,
    *,
    trains: bool,
    has_loss: bool = True,
    loss_scale: Tensor | None = None,
    reduce: bool = False,
    on_whole_step: Callable[[], None] = lambda: None,
    in_step: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Any:
    """Run a batch and merge what the step returned; None above pipeline rank 0."""
    pipeline = session.pipeline
    session.progress.begin_batch(trains=trains)
    is_first = trains and progress.batch_idx(trainer) == 0
    if pipeline.rank > 0:
        with session.norms.batch(), explaining_single_samples(trainer.lightning_module):
            return pipeline.follow(trains=trains, reduce=reduce, is_first=is_first)
    source = source_of(trainer)
    split = pipeline.split(batch, source)
    if trains:
        session.samples.note(pipeline.splitter.num_samples(batch, source))
        session.begin_training(trainer.lightning_module, split)
    weights = session.weigh(split.pieces, split.sizes, trains=trains)
    microbatch_steps = MicrobatchSteps(session, trainer, split, weights, trains=trains)
    given = list(map(children, split.step_inputs)) if session.hand_over.after_batches else []

    def measured_step(inputs: Any) -> Any:
        with pipeline.engine.memory.user_code():
            return step(inputs)

    kind = f"trains={trains} reduce={reduce} grad={torch.is_grad_enabled()}"
    running = Batch(
        microbatches.signature(batch, split.sizes.parts, kind),
        pipeline.reduces_in_batch(reduce),
        step=lambda m: measured_step(split.step_inputs[m]),
        dry_run_step=lambda m: measured_step(split.block_input(m)),
        on_user_code=microbatch_steps.enter,
        on_whole_step=on_whole_step,
        in_step=in_step,
        on_loss=microbatch_steps.note_loss,
        loss_weights=[weights.in_gradient[piece] * progress.share_of_step(trainer) for piece in split.own],
        loss_scale=loss_scale,
        num_microbatches=split.num_microbatches,
        num_samples=split.num_samples,
        has_loss=has_loss,
    )
    with microbatch_steps.running(running), session.norms.batch():
        key = progress.batch_key(trainer)
        pipeline.lead(running, split.num_microbatches, key, trains=trains, reduce=reduce, is_first=is_first)
    if given:
        hide_changed(batch, given, split.step_inputs)
    return microbatch_steps.merge(running)


def _hand_over(session: Session, result: Any, batch: Any) -> Any:
    """Let hooks on all pipeline ranks read the batch and what the step returned; return the latter."""
    received = session.hand_over.after_batch(outputs=result, batch=batch)
    if isinstance(batch, PlaceholderBatch):
        batch.content = received["batch"]
    if is_profiling():
        session.finish_sends()
    return received["outputs"]


def _with_loss(result: Any, loss: Tensor) -> Any:
    return {**result, "loss": loss} if isinstance(result, Mapping) else loss

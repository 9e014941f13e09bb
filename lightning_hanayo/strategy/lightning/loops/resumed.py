"""Puts Lightning's loops where a checkpoint left them, so that the run continues as if it hadn't ended.

saved                                           Lightning 2.6 continues                     here
in `on_train_epoch_end`, with `max_steps`       with one batch more in the same epoch       with the next epoch
where `max_steps` has cut an epoch              in the epoch, counted as the next one       in the epoch
after the last batch of a loader without len    with more batches in the same epoch         with the next epoch
in mid-epoch, of a loader without len           after a batch that it had read ahead        with that batch
before a validation in mid-epoch                without the validation                      with the validation

Lightning makes the iterator of the training loader before `on_train_start`, and before samplers know their epoch. Here
it is made anew where the uninterrupted run would make it, and the random generators are set to their saved states.
"""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.loops.loop import _Loop

from lightning_hanayo.strategy.lightning.loops.loader_states import load_loader_states
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def correct_loops(trainer: "pl.Trainer") -> None:
    """Correct what Lightning has restored of the loops. Called once they are, before they run."""
    fit_loop: Any = trainer.fit_loop
    epochs, batches = fit_loop.epoch_progress, fit_loop.epoch_loop.batch_progress
    fit_loop._combined_loader_states_to_load = []  # those of data rank 0
    if was_in_batch(trainer):
        return
    has_ended = epochs.current.processed == epochs.current.ready
    if has_ended and not batches.is_last_batch and fit_loop.restarting:  # cut by `max_steps`
        for progress in (epochs.current, epochs.total):
            progress.processed -= 1
            progress.completed = min(progress.completed, progress.processed)
    elif batches.is_last_batch and (has_ended or batches.current.completed < batches.current.processed):
        if not has_ended:  # saved in `on_train_batch_end`
            batches.increment_completed()
            fit_loop.epoch_loop._batches_that_stepped += 1
            epochs.increment_processed()
            epochs.increment_completed()
        _Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]  # its own setter says True with `max_steps`


def plain_loader_states(trainer: "pl.Trainer") -> list[Any]:
    """The states of loaders that a plain Trainer has stored with its loops. Called before `correct_loops`."""
    return list(trainer.fit_loop._combined_loader_states_to_load)


def was_in_batch(trainer: "pl.Trainer") -> bool:
    """Whether a batch is under way, or was when the checkpoint was saved. Then Lightning runs one in its place."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return bool(batches.ready != batches.processed)


def is_in_epoch(trainer: "pl.Trainer") -> bool:
    """Whether the restored loops continue in the middle of an epoch."""
    return bool(trainer.fit_loop.restarting) and num_batches(trainer) > 0


def num_batches(trainer: "pl.Trainer") -> int:
    """How many batches of the epoch have been trained."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    return int(batches.processed)


def num_accumulated(trainer: "pl.Trainer") -> int:
    """How many batches' gradients have been added up since the last optimizer step."""
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    return 0 if is_last else num_batches(trainer) % trainer.accumulate_grad_batches


def read_data_anew(
    trainer: "pl.Trainer",
    attributes: TemporaryAttributes,
    states: Sequence[Any],
    have_more: Sequence[bool],
    set_generators: Callable[[str], None],
) -> None:
    """Let the first epoch make the iterator of the training loader anew. Called by all ranks in `on_train_start`.

    Args:
        trainer: whose loops are restored, and have not run.
        attributes: restored at the end of the run.
        states: of the loaders that have one; none on a rank that reads no data.
        have_more: for each of them, whether it could have given more batches in its epoch.
        set_generators: sets the random generators to the states that they had when the checkpoint was saved ("now"), or
            "before" the batch that had been read ahead.
    """
    epoch_loop: Any = trainer.fit_loop.epoch_loop
    original, in_epoch = epoch_loop.on_run_start, is_in_epoch(trainer)

    def on_run_start(fetcher: Any) -> None:
        attributes.set(epoch_loop, "on_run_start", original)
        load_loader_states(trainer, states, skip=() if in_epoch else have_more)
        if in_epoch:
            set_generators("before")
        elif any(have_more):  # batches that were skipped have been read
            set_generators("now")
        iter(fetcher)
        if in_epoch:  # what this draws was drawn before the checkpoint was saved
            set_generators("now")
        original(fetcher)
        if in_epoch:
            _catch_up_validation(epoch_loop, fetcher)

    set_generators("now")
    attributes.set(epoch_loop, "on_run_start", on_run_start)


def _catch_up_validation(epoch_loop: Any, fetcher: Any) -> None:
    """Let the epoch begin with the validation that comes after the batch in whose end the checkpoint was saved."""
    if epoch_loop.restarted_on_train_batch_end and epoch_loop._should_check_val_fx(fetcher):
        epoch_loop.val_loop.restarting = False
        epoch_loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        if not epoch_loop._should_accumulate():
            epoch_loop._batches_that_stepped -= 1  # counted already, and again after the validation

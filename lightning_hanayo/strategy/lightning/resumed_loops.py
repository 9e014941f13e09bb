"""Puts Lightning's loops where a checkpoint left them, so that the run continues as if it hadn't ended.

saved                                           Lightning 2.6 continues                     here
in `on_train_epoch_end`, with `max_steps`       with one batch more in the same epoch       with the next epoch
where `max_steps` has cut an epoch              in the epoch, counted as the next one       in the epoch
after the last batch of a loader without len    with more batches in the same epoch         with the next epoch
in mid-epoch, of a loader without len           after a batch that it had read ahead        with that batch
in `on_train_epoch_start`                       with one batch more in the epoch before     with the epoch
before a validation in mid-epoch                without the validation                      with the validation

Lightning makes the iterator of the training loader before `on_train_start`, and before samplers know their epoch. Here
it is made anew where the uninterrupted run would make it, and the random generators are set to their saved states.

The training loaders of this rank: their states and random generators, and the size of their batches.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.loops.loop import _Loop
from torch import Tensor

from lightning_hanayo.strategy.patches import TemporaryAttributes


def correct_loops(trainer: "pl.Trainer") -> None:
    """Correct the loops that Lightning has restored. Called once they are, before they run."""
    fit_loop: Any = trainer.fit_loop
    epochs, batches = fit_loop.epoch_progress, fit_loop.epoch_loop.batch_progress
    fit_loop._combined_loader_states_to_load = []  # those of data rank 0
    if was_in_batch(trainer):
        return
    if epochs.current.started < epochs.current.ready:  # saved in `on_train_epoch_start`, which is called again
        for progress in (epochs.current, epochs.total):
            progress.ready -= 1
        _Loop.restarting.fset(fit_loop, False)  # type: ignore[attr-defined]
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


def can_scale_batches(trainer: "pl.Trainer", before: int, now: int) -> bool:
    """Whether the samples of the epoch's batches so far, `before` of each, are those of whole batches of `now`."""
    return not was_in_batch(trainer) and not num_batches(trainer) * before % now


def scale_batches(trainer: "pl.Trainer", before: int, now: int) -> None:
    """Let the epoch's batches so far, of `before` samples each, count as batches of `now` samples."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    added = num_batches(trainer) * before // now - num_batches(trainer)
    for progress in (batches.current, batches.total):
        for name in ("ready", "started", "processed", "completed"):
            setattr(progress, name, getattr(progress, name) + added)


def follow_accumulation_schedule(trainer: "pl.Trainer") -> bool:
    """Accumulate as in the saved epoch: `GradientAccumulationScheduler` does so in `on_train_epoch_start` alone.

    Returns:
        Whether there is such a callback.
    """
    epochs: Any = trainer.fit_loop.epoch_progress.current
    epoch = epochs.processed if is_in_epoch(trainer) else max(0, epochs.processed - 1)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    schedules = [one for one in callbacks if isinstance(one, GradientAccumulationScheduler)]
    for schedule in schedules:
        trainer.accumulate_grad_batches = schedule.get_accumulate_grad_batches(epoch)
    return bool(schedules)


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
        if in_epoch:  # these numbers were drawn before the checkpoint was saved
            set_generators("now")
        original(fetcher)
        if in_epoch:
            _end_as_any_epoch(trainer, attributes)
            _catch_up(epoch_loop, fetcher)

    set_generators("now")
    attributes.set(epoch_loop, "on_run_start", on_run_start)


def is_after_last_batch(trainer: "pl.Trainer") -> bool:
    """Whether it was saved in `on_train_batch_end` of an epoch's last batch. Called before `correct_loops`."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress
    is_in_hook = batches.current.completed < batches.current.processed == batches.current.ready
    return bool(batches.is_last_batch and is_in_hook and epochs.processed < epochs.ready)


def metrics(trainer: "pl.Trainer") -> dict[str, float]:
    """The metrics that callbacks and schedulers can monitor."""
    return {name: float(value) for name, value in trainer._logger_connector._callback_metrics.items()}


def set_metrics(trainer: "pl.Trainer", values: Mapping[str, float]) -> None:
    """Let callbacks and schedulers monitor the metrics of the time when the checkpoint was saved."""
    found = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}
    trainer._logger_connector._callback_metrics.update(found)


def is_before_plateau(trainer: "pl.Trainer") -> bool:
    """Whether an epoch has ended, but not for schedulers that wait for a metric. Called before `correct_loops`."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    return bool(is_last and epochs.ready == epochs.processed == epochs.completed + 1)


def update_plateau_schedulers(trainer: "pl.Trainer") -> None:
    """Step the schedulers that follow `on_train_epoch_end`, where checkpoints are saved. Called in `on_train_start`."""
    names = {one.monitor for one in trainer.lr_scheduler_configs if one.reduce_on_plateau}
    if not names <= trainer.callback_metrics.keys():  # of an earlier version's checkpoint
        return
    epochs: Any = trainer.fit_loop.epoch_progress.current
    completed, epochs.completed = epochs.completed, epochs.processed - 1
    trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
    epochs.completed = completed


def _end_as_any_epoch(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Let schedulers that wait for a metric step when this epoch ends: Lightning leaves them out while it restarts."""
    connector: Any = trainer._logger_connector
    on_epoch_end = connector.on_epoch_end

    def after_hooks() -> None:
        if trainer.training:  # and not in a validation in mid-epoch
            attributes.set(connector, "on_epoch_end", on_epoch_end)
            trainer.fit_loop._restarting = False
        on_epoch_end()

    attributes.set(connector, "on_epoch_end", after_hooks)


def _catch_up(epoch_loop: Any, fetcher: Any) -> None:
    """Let the epoch begin after the batch in whose end the checkpoint was saved."""
    if not epoch_loop.restarted_on_train_batch_end:
        return
    if not epoch_loop._should_check_val_fx(fetcher):
        epoch_loop.update_lr_schedulers("step", update_plateau_schedulers=True)
    else:
        epoch_loop.val_loop.restarting = False
        epoch_loop.val_loop._restart_stage = RestartStage.RESTARTED_MID_EVALUATION
        if not epoch_loop._should_accumulate():
            epoch_loop._batches_that_stepped -= 1  # counted already, and again after the validation


def loader_states(trainer: "pl.Trainer") -> list[Any]:
    """The states of the loaders with `state_dict()`, after the batch that was trained last. Called where data is read.

    Lightning reads a loader without a length one batch ahead, so its state is the one before that batch.
    """
    is_ahead = _is_read_ahead(trainer)
    return [loader.state_before if is_ahead else loader.state_dict() for loader in stateful_loaders(trainer)]


def random_states_before(trainer: "pl.Trainer") -> dict[str, Tensor]:
    """The states of the random generators before the batch that was read ahead; none if there isn't one."""
    loaders = stateful_loaders(trainer) if _is_read_ahead(trainer) else ()
    return {} if not loaders else dict(loaders[0].random_before)


def _is_read_ahead(trainer: "pl.Trainer") -> bool:
    return bool(getattr(trainer.fit_loop._data_fetcher, "batches", ()))


def have_more(trainer: "pl.Trainer") -> list[bool]:
    """For each loader with a state, whether it has batches that the epoch has not read so far, or will not read.

    So it is at the end of epochs that `limit_train_batches`, or a shorter loader next to it, has cut.
    """
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    num_read = batches.processed
    without_end = _is_read_ahead(trainer) or num_read == trainer.num_training_batches
    loaders = stateful_loaders(trainer)
    lengths = [sized_len(loader) for loader in loaders]
    return [
        getattr(loader, "leaves_out", False) or (without_end if not length else num_read % length > 0)
        for loader, length in zip(loaders, lengths, strict=True)
    ]


def load_loader_states(trainer: "pl.Trainer", states: Sequence[Any], skip: Sequence[bool] = ()) -> None:
    """Let the loaders continue where they were, or where `skip` says so with their next epoch."""
    for loader, state, skips in zip_longest(stateful_loaders(trainer), states, skip):
        if loader is not None and state is not None:
            loader.load_state_dict(state)
            if skips:
                loader.skip_rest()


def generators_of_loaders(trainer: "pl.Trainer") -> dict[str, torch.Generator]:
    """The generators that the user has given to loaders and their samplers, by a name."""
    found: dict[str, torch.Generator] = {}
    for i, loader in enumerate(_training_loaders(trainer)):
        for owner in ("sampler", "loader"):
            generator = getattr(loader if owner == "loader" else getattr(loader, "sampler", None), "generator", None)
            if isinstance(generator, torch.Generator) and generator not in found.values():
                found[f"{owner}{i}"] = generator
    return found


def has_persistent_workers(trainer: "pl.Trainer") -> bool:
    """Whether workers of a training loader live longer than an epoch."""
    return any(getattr(loader, "persistent_workers", False) for loader in _training_loaders(trainer))


def stateful_loaders(trainer: "pl.Trainer") -> list[Any]:
    """The training loaders that have a state."""
    loaders = _training_loaders(trainer)
    return [one for one in loaders if hasattr(one, "state_dict") and hasattr(one, "load_state_dict")]


def batch_size(trainer: "pl.Trainer") -> int | None:
    """How many samples the training loader puts into a batch; None if it doesn't say, or if there are several."""
    loaders = _training_loaders(trainer)
    size = getattr(loaders[0], "batch_size", None) if len(loaders) == 1 else None
    return size if isinstance(size, int) else None


def _training_loaders(trainer: "pl.Trainer") -> list[Any]:
    """None before the loop has asked for them."""
    combined = trainer.fit_loop._combined_loader
    return [] if combined is None else list(combined.flattened)

"""Lightning's loops on several ranks: equal numbers of loaders and batches, and validation at the same time.

`agree_on_counts`: all ranks ask for the same number of loaders, or the run ends with an error that names the ranks.

`SameLength`: an epoch has as many training batches as the data rank with the fewest.

data rank 0    b0  b1  b2  b3  b4       lengths known: 5 and 3, agreed before training
data rank 1    b0  b1  b2               unknown: "I have one more" before each batch, until one has none
both           b0  b1  b2  end

`validate_together`: all ranks validate after the same batch if `val_check_interval` is a time, which each rank measures
by its own clock.

`load_instead`: a run starts from another checkpoint than the one that `fit` was given.

`end_searches_on_failure`: a search for the largest batch size ends when one of several ranks is out of memory.

trial     2 fits    4 fits    8: rank 1 is out of memory, while rank 0 waits for its message
error     on all ranks: "rank 1 is out of memory with batch_size=8 ... 4 has fitted"

In one process Lightning goes on with a smaller size. Here the batch is half done on the other ranks.

Puts Lightning's loops where a checkpoint left them, so that the run continues as if it hadn't ended.

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
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler
from lightning.pytorch.loops.evaluation_loop import RestartStage
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.utilities import CombinedLoader, rank_zero_warn
from lightning.pytorch.utilities.memory import is_oom_error
from lightning.pytorch.utilities.parsing import lightning_getattr
from torch import Tensor

from lightning_hanayo.errors import HanayoError, UnsupportedError, available, listed
from lightning_hanayo.pipeline_parallel.object_collectives import all_gather_objects
from lightning_hanayo.strategy.joining import on_all_ranks
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.strategy.run import Run


def keep_inference_mode(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Run the loops in the mode that the Trainer was given, until `attributes` are restored.

    Lightning uses `torch.no_grad` with gloo, whose collectives once failed in inference mode. A validation within `fit`
    never runs in inference mode.
    """
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        if loop.inference_mode:
            attributes.wrap(loop, "run", torch.inference_mode()(lambda run: run()))


def agree_on_counts(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Compare the numbers of loaders whenever a loop asks for its loaders. Called by all ranks of several."""
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    for loop in (*loops, trainer.predict_loop):
        attributes.wrap(loop._data_source, "dataloader", partial(_request, loop._data_source.name))


def check_counts(name: str, counts: Sequence[int]) -> None:
    """Check that all ranks have the same number of loaders. `counts`: by rank.

    Raises:
        HanayoError: they don't.
    """
    if len(set(counts)) > 1:
        found = listed([f"{count} on rank {rank}" for rank, count in enumerate(counts)], 4)
        raise HanayoError(f"{name} gives ranks different numbers of loaders: {found}. Return as many on each rank")


def _request(name: str, request: Callable[[], Any]) -> Any:
    """Lightning's request for loaders, and the check."""
    loaders = request()
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders)
    check_counts(name, on_all_ranks(lambda: len(combined.flattened)))
    return loaders


class SameLength:
    """One data rank's part in the agreement for one training loader. Called by all of them.

    Args:
        own: the number of this rank's batches; None: not known.
        is_certain: whether the loader surely gives as many.
        get_run: returns the run under way.
    """

    def __init__(self, own: int | None, is_certain: bool, get_run: Callable[[], Run]) -> None:
        self._get_run = get_run
        found = all_gather_objects(self._group, (own, is_certain))
        lengths = [length for length, _ in found if length is not None]
        self.length = min(lengths) if len(lengths) == len(found) else None
        """the number of batches on all data ranks; None if one of them doesn't know its own"""
        self.is_certain = all(certain for _, certain in found)
        """whether each data rank surely has as many"""
        if self.length is not None:
            _warn(lengths)

    def all_have_one_more(self, has_one: bool, num_read: int) -> bool:
        """Whether all data ranks have a batch, after `num_read` that all had. Waits for the slowest of them."""
        have_one = torch.tensor(int(has_one))
        dist.all_reduce(have_one, dist.ReduceOp.MIN, self._group)
        if not have_one:
            _warn([num_read + int(one) for one in all_gather_objects(self._group, has_one)], or_more=True)
        return bool(have_one)

    @property
    def _group(self) -> dist.ProcessGroup:
        """The data ranks. Not kept: the group would outlive a failure."""
        return available(self._get_run().groups.data_control, "there are several data ranks")


def _warn(lengths: list[int], *, or_more: bool = False) -> None:
    """Say which data rank has the fewest batches, if not all have as many."""
    fewest, most = min(lengths), max(lengths)
    if fewest < most:
        rank_zero_warn(
            f"Data rank {lengths.index(fewest)} has {fewest} training batches in this epoch, others up to {most}"
            f"{' or more' * or_more}. All end the epoch there; drop_last=True, or a DistributedSampler, uses all"
        )


def validate_together(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Validate as soon as one rank would: its vote is asked for after each batch. Called by all ranks of several."""
    epoch_loop = trainer.fit_loop.epoch_loop
    if trainer._val_check_time_interval is not None:  # type: ignore[attr-defined]
        agree = trainer.strategy.reduce_boolean_decision
        attributes.wrap(epoch_loop, "_should_check_val_fx", lambda own, fetcher: agree(own(fetcher), all=False))


Load = Callable[[Any, bool | None], None]
"""loads a checkpoint from a path, with `weights_only` as for `torch.load`; None: there is nothing to load"""


def load_instead(
    trainer: "pl.Trainer", attributes: TemporaryAttributes, load: Callable[[Load, Any, bool | None], None]
) -> None:
    """Call `load` where Lightning would load the checkpoint that the user gave.

    Args:
        trainer: of a run that has not loaded anything so far.
        attributes: restored at the end of the run.
        load: gets Lightning's own function, which it may call with other arguments, and the user's path.
    """
    attributes.wrap(trainer._checkpoint_connector, "resume_start", load)


def loaded(trainer: "pl.Trainer") -> Mapping[str, Any]:
    """The checkpoint that was loaded."""
    return trainer._checkpoint_connector._loaded_checkpoint


def was_in_epoch(checkpoint: Mapping[str, Any]) -> bool:
    """Whether it was saved in the middle of an epoch."""
    batches = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {})
    return bool(batches.get("current", {}).get("processed")) and not batches.get("is_last_batch")


def end_searches_on_failure(trainer: "pl.Trainer", attributes: TemporaryAttributes, rank: int) -> None:
    """Let a trial that fails end the run: `BatchSizeFinder`, and `Tuner.scale_batch_size`, which adds one.

    Args:
        trainer: of a run on several ranks.
        attributes: restored at the end of the run.
        rank: this process's, in the world.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, BatchSizeFinder):
            attributes.wrap(callback, "scale_batch_size", partial(_search, callback._batch_arg_name, rank))


def _search(
    name: str, rank: int, search: Callable[..., object], trainer: "pl.Trainer", module: "pl.LightningModule"
) -> None:
    """Lightning's search, with trials whose errors it doesn't catch."""
    loop: Any = trainer._active_loop
    fitted = [0]

    def trial(run: Callable[[], Any]) -> Any:
        size: Any = lightning_getattr(module, name)
        try:
            result = run()
        except Exception as error:
            failure = error
            if is_oom_error(error):
                advice = f"{max(fitted)} has fitted: set it" if max(fitted) else "start with a smaller init_val"
                failure = UnsupportedError(
                    f"rank {rank} is out of memory with {name}={size}, and other ranks are in the middle of the batch, "
                    f"so the search can't go on. {advice}, without a BatchSizeFinder, or limit it with max_val"
                )
            # Lightning then restores model and loaders, for which it would wait for ranks that don't do so.
            attributes.set(loop, "load_state_dict", partial(_raise, failure))
            raise failure from (error if failure is not error else error.__cause__)
        fitted.append(size)
        return result

    with TemporaryAttributes() as attributes:
        attributes.wrap(loop, "run", trial)
        search(trainer, module)


def _raise(error: BaseException, *_: object) -> NoReturn:
    raise error


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

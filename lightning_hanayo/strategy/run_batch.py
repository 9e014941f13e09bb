"""Runs one batch for a hook: cuts it, runs the pipeline on it, merges results and logs, and defers gradients.

hook  ->  train / run  ->  pipeline  ->  engine  ->  stages  ->  the user's step, once per micro-batch

`MicrobatchSteps` follows the steps on pipeline rank 0:

enter         before each piece of user code, by micro-batch
running       while the batch runs; at the end logged values are merged
merge         afterwards: collected values, and the results of the steps
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.batches import microbatches
from lightning_hanayo.pipeline_parallel.batches.merge import HostNumbers
from lightning_hanayo.pipeline_parallel.batches.microbatches import children
from lightning_hanayo.pipeline_parallel.grad_sync import DeferredGradients
from lightning_hanayo.pipeline_parallel.stages import find_loss, loss_of
from lightning_hanayo.pipeline_parallel.trace import is_profiling
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch
from lightning_hanayo.strategy.lightning import state, user_hooks
from lightning_hanayo.strategy.lightning.loaders import PlaceholderBatch, source_of
from lightning_hanayo.strategy.lightning.loops import batch_size
from lightning_hanayo.strategy.lightning.metrics import MicrobatchLog, shared_metrics_of
from lightning_hanayo.strategy.losses import PieceWeights
from lightning_hanayo.strategy.probing.probe import own_copy
from lightning_hanayo.strategy.session import Session
from lightning_hanayo.strategy.setup.checks import explaining_single_samples
from lightning_hanayo.strategy.user_code.collected import Left, hide_changed, keep_collected
from lightning_hanayo.strategy.user_code.collectives import RunningStep

UserStep = Callable[..., Any]
"""The user's step: takes a micro-batch, and further arguments."""
Args = tuple[Any, ...]


def train(session: Session, batch: Any, step: UserStep, args: Args, *, steps: bool) -> Any:
    """Run forward and backward of a batch. Called by all ranks; the batch counts on pipeline rank 0 only.

    `args`: those of the step after the batch.

    `steps` says whether the optimizer steps after this batch; otherwise gradients accumulate.

    Returns:
        The merged results of the step, with a loss whose backward gives the gradients to the parameters.
    """
    pipeline, trainer = session.pipeline, session.trainer
    loss_scale = state.loss_scale(trainer)
    continues, stopping = state.continues_accumulation(trainer), trainer.should_stop
    scales = user_hooks.may_scale_backward(trainer)
    is_cube = session.topology.replica_size > session.topology.pipe
    runs_once = pipeline.runs_whole_batches
    reads = not runs_once and user_hooks.may_read_gradients(trainer)
    shows_in_steps = reads and not is_cube  # there parameters are whole in a batch only, and old gradients never
    separate = continues and (scales or shows_in_steps)
    deferred = DeferredGradients(
        pipeline.parameters,
        accumulates=continues,
        keeps_old=user_hooks.user_defines(trainer, "optimizer_zero_grad", "on_before_zero_grad"),
        shows_old=runs_once,
        shows_in_steps=shows_in_steps and pipeline.rank == 0,
        separate=separate,
        scales=scales,
        finish=pipeline.reduce_gradients if separate and steps else None,
        unguarded=session.guard.off,
    )
    result = _run_batch(
        session,
        batch,
        step,
        args,
        trains=True,
        reduce=steps and not separate,
        loss_scale=loss_scale,
        on_whole_step=deferred.end_step,
        in_step=deferred.in_step if reads or pipeline.runs_whole_steps else nullcontext,
    )
    deferred.stash()
    if session.topology.replica_size == 1 and find_loss(result) is None:
        return result  # None: Lightning skips the batch. Anything else that is not a loss is Lightning's error
    loss = loss_of(result) if pipeline.rank == 0 else torch.zeros((), device=session.device)
    if session.topology.replica_size > 1:
        if trainer.should_stop != stopping:
            raise UnsupportedError(
                "training_step set trainer.should_stop, which the other ranks of the model don't see. Set it in a hook "
                "that runs on all ranks, such as on_train_batch_end, by what is in trainer.callback_metrics."
            )
        if user_hooks.reads_step_metrics(trainer, state.batch_idx(trainer), steps=steps):
            loss = shared_metrics_of(trainer).share_current(loss)
    result = _hand_over(session, result, batch)
    expected = state.expected_gradient(trainer, loss_scale)
    surrogate = deferred.surrogate_loss(loss.reshape(()), expected).reshape(loss.shape)
    return {**result, "loss": surrogate} if isinstance(result, Mapping) else surrogate


def run(session: Session, batch: Any, step: UserStep, args: Args, *, is_manual: bool = False) -> Any:
    """Run the forward of a batch, or a step of manual optimization, with its backwards and optimizer steps.

    Called by all ranks, which are single if `is_manual`. Returns the merged results, or their stand-ins.
    """
    result = _run_batch(session, batch, step, args, trains=is_manual, has_loss=not is_manual)
    return _hand_over(session, result, batch)


def average_gradients(session: Session) -> None:
    """After a backward of manual optimization: give all data ranks the mean of their gradients. Called by all."""
    if session.topology.data > 1:
        session.pipeline.reduce_gradients()
        trained = [parameter for parameter in session.pipeline.parameters if parameter.requires_grad]
        for gradient in (parameter.grad for parameter in trained if parameter.grad is not None):
            gradient.div_(session.topology.data)


def _run_batch(
    session: Session, batch: Any, step: UserStep, args: Args, *, trains: bool, reduce: bool = False, **of_batch: Any
) -> Any:
    """Run a batch and merge the results of the step; None above pipeline rank 0. `of_batch`: further values of it."""
    pipeline, trainer = session.pipeline, session.trainer
    session.failures.end_hook()
    is_first = trains and state.batch_idx(trainer) == 0
    if pipeline.rank > 0:
        with session.norms.batch(), explaining_single_samples(session.module):
            return pipeline.run(trains=trains, reduce=reduce, is_first=is_first)
    source = source_of(trainer)

    def dry_step(part: Any) -> Any:
        return step(part, *args)

    with session.norms.batch():
        stack_split, is_whole = session.split(batch, source, dry_step, trains=trains, is_first=is_first)
    splitter = pipeline.stack_splitter if is_whole else pipeline.splitter
    split = splitter.whole(batch) if is_whole else stack_split
    if trains:
        session.samples.note(batch_size(trainer) or splitter.num_samples(batch, source))
        session.begin_training(stack_split, is_whole=is_whole)
    stage = "" if trains else source.stage
    weights = session.weigh(split.pieces, split.sizes, stage, is_whole=is_whole)
    microbatch_steps = MicrobatchSteps(session, split, weights, splitter, trains=trains)
    given = list(map(children, split.step_inputs)) if session.hand_over.after_batches else []

    share = state.share_of_step(trainer) / split.num_alike
    kind = f"trains={trains} reduce={reduce} grad={torch.is_grad_enabled()}"
    running = Batch(
        microbatches.signature(batch, stack_split.sizes.parts, kind),
        pipeline.reduces_in_batch(reduce),
        step=lambda m: step(split.step_inputs[m], *args),
        dry_run_step=lambda m: dry_step(own_copy(stack_split.block_input(m)) if is_whole else split.block_input(m)),
        on_user_code=microbatch_steps.enter,
        on_loss=microbatch_steps.note_loss,
        loss_weights=[weights.in_gradient[piece] * share for piece in split.own],
        num_microbatches=stack_split.num_microbatches,
        num_samples=stack_split.shares if is_whole else split.num_samples,
        is_whole=is_whole,
        **of_batch,
    )
    with microbatch_steps.running(running), session.norms.batch():
        key = state.batch_key(trainer)
        pipeline.run(running, key, trains=trains, reduce=reduce, is_first=is_first)
    if given:
        hide_changed(batch, given, split.step_inputs)
    return microbatch_steps.merge(running)


def _hand_over(session: Session, result: Any, batch: Any) -> Any:
    """Let hooks on all pipeline ranks read the batch and the step's result; return the latter."""
    received = session.hand_over.after_batch(outputs=result, batch=batch)
    if isinstance(batch, PlaceholderBatch):
        batch.content = received["batch"]
    if is_profiling():
        session.finish_sends()
    return received["outputs"]


@dataclass(eq=False, repr=False)
class MicrobatchSteps:
    """The steps of one batch."""

    session: Session
    """the run"""
    split: SplitBatch
    """the batch in pieces, some of which this rank runs"""
    weights: PieceWeights
    """of each piece"""
    splitter: BatchSplitter
    """has made them"""
    _: KW_ONLY
    trains: bool
    """whether they are training steps"""

    def __post_init__(self) -> None:
        self._sizes = [self.split.sizes.parts[0][piece] for piece in self.split.own]
        trainer = self.session.trainer
        self._log = MicrobatchLog(trainer, self.split, self.weights, self.splitter, self.session.given_batch_sizes)
        self._left: list[Left] = []
        self._numbers = HostNumbers()
        self._step_name = state.step_name(trainer)
        self._options = state.options_now(trainer) if self.trains and self.session.topology.pipe > 1 else None
        is_once = self.session.topology.replica_size == 1 and self.split.num_microbatches == 1
        self._collections = None if is_once else self.session.collections
        """of the module; None if the step runs once, so that there is nothing to merge"""
        if self._collections is not None:
            self._collections.begin_batch()
        self.session.collectives.begin_batch()

    def enter(self, microbatch: int | None) -> None:
        """Called before user code of that micro-batch starts or continues; None: a dry run, which leaves nothing."""
        if microbatch == 1 and self.trains and self._options is None:  # all steps may set what the first one has
            self._options = state.options_now(self.session.trainer)
        self.split.check()
        self._log.enter(microbatch)
        if self._collections is not None:
            self._collections.enter(microbatch)
        running = None
        if microbatch is not None:
            piece = self.split.own[microbatch]
            is_present = self.split.pieces[piece] is not None and self.split.counts
            samples = max(1, self._sizes[microbatch]) if is_present else 0  # 0: a padding sample
            weighs = is_present and self.weights.in_gradient[piece] > 0
            running = RunningStep(self._step_name, microbatch, self.split.num_microbatches, samples, weighs)
        self.session.collectives.enter(running)

    def note_loss(self, microbatch: int, loss: Any) -> None:
        """Called with each loss before its backward."""
        if self.session.token_losses is not None:
            self.session.token_losses.check()
        self.session.values.note_loss(microbatch, loss)

    @contextmanager
    def running(self, batch: Batch) -> Iterator[None]:
        """To be open while `batch` runs."""
        session, trainer = self.session, self.session.trainer
        single = explaining_single_samples(session.module)
        is_once = session.topology.pipe == 1 and self.split.num_microbatches == 1
        unstepped = state.refusing_steps(trainer) if self.trains and not is_once else nullcontext()
        losses = session.token_losses
        shares = nullcontext() if losses is None else losses.in_batch(runs_alike=self.split.num_alike > 1)
        with self._log.collecting(), single, unstepped, shares:
            yield
            if self._options is not None:
                state.check_options(trainer, self._options)
            count = self.split.num_microbatches
            if self._collections is not None:
                self._left = self._collections.end_batch(count)
                for m, own in enumerate(self._left):
                    own.used_collectives = m in session.collectives.used
                    own.note_means(batch.results[m], self._log.means_of(self.split.own[m]))
                self._numbers.add([batch.results, [vars(own) for own in self._left]])
            if self.weights.is_sum and batch.has_loss:
                self._log.add_up([loss_of(batch.results[m]) for m in range(count)], self._numbers)

    def merge(self, batch: Batch) -> Any:
        """Store the values that the steps have collected, and return their results, as if one step had run.

        Called by all ranks that share the micro-batches.
        """
        session, split, weights = self.session, self.split, self.weights
        if self.trains and session.choice is not None:
            session.choice.note_logged(self._log.names)
        results = batch.results
        if self._collections is None:
            return results[0]
        if self.trains and batch.has_loss and not session.hand_over.after_batches:  # nobody reads the rest
            results = {
                m: {"loss": result["loss"]} if isinstance(result, Mapping) and "loss" in result else result
                for m, result in results.items()
            }
        values = [(results[m], own, split.changes(m)) for m, own in enumerate(self._left)]
        merged, collected, changes = zip(*self.splitter.by_piece(values), strict=True)
        self._numbers.add([merged, [vars(own) for own in collected]])
        split.store(changes)
        apart = keep_collected(self._collections, split, weights, collected, self._numbers)
        session.warn_of_parts(apart, split.num_microbatches)
        return split.merge(merged, weights, has_loss=self.trains and batch.has_loss, numbers=self._numbers)

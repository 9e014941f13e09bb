"""Follows the steps of one batch's micro-batches on pipeline rank 0: what they log, collect, gather and return.

enter         before each piece of user code, by micro-batch
running       while the batch runs; at the end what was logged is merged
merge         afterwards: what was collected, and what the steps returned
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl

from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.stages.first_last import loss_of
from lightning_hanayo.strategy.batch_split import SplitBatch
from lightning_hanayo.strategy.lightning import optimizers, progress
from lightning_hanayo.strategy.lightning.microbatch_log import MicrobatchLog
from lightning_hanayo.strategy.losses.loss_weight import PieceWeights
from lightning_hanayo.strategy.session import Session
from lightning_hanayo.strategy.setup.checks import explaining_single_samples
from lightning_hanayo.strategy.user_code.collectives import RunningStep
from lightning_hanayo.strategy.user_code.merge_collected import keep_collected


class MicrobatchSteps:
    """The steps of one batch.

    Args:
        session: the run.
        trainer: whose results take what is logged.
        split: the batch in pieces, some of which this rank runs.
        weights: of each piece.
        trains: whether they are training steps.
    """

    def __init__(
        self, session: Session, trainer: "pl.Trainer", split: SplitBatch, weights: PieceWeights, *, trains: bool
    ) -> None:
        self._session = session
        self._trainer = trainer
        self._split = split
        self._weights = weights
        self._trains = trains
        self._sizes = [split.sizes.parts[0][piece] for piece in split.own]
        self._log = MicrobatchLog(
            trainer, split, weights.in_mean, session.pipeline.splitter, given=session.given_batch_sizes
        )
        self._options = optimizers.options_now(trainer) if trains and session.topology.pipe > 1 else None
        session.collections.begin_batch()
        session.collectives.begin_batch()

    def enter(self, microbatch: int | None) -> None:
        """Called before user code of that micro-batch starts or continues; None: a dry run, which leaves nothing."""
        if microbatch == 1 and self._trains and self._options is None:  # what the first step has set, all may set
            self._options = optimizers.options_now(self._trainer)
        self._split.check()
        self._log.enter(microbatch)
        self._session.collections.enter(microbatch)
        self._session.collectives.enter(None if microbatch is None else self._running_step(microbatch))

    def note_loss(self, microbatch: int, loss: Any, stop: Any) -> None:
        """Called with each loss before its backward; `stop`: where the code after the stack begins in its graph."""
        if self._session.token_losses is not None:
            self._session.token_losses.check()
        self._session.loss_watch.note(self._sizes, microbatch, loss, stop)
        self._session.values.note_loss(microbatch, loss)

    @contextmanager
    def running(self, batch: Batch) -> Iterator[None]:
        """To be open while `batch` runs."""
        watch = self._session.loss_watch.training(self._sizes) if self._trains else nullcontext()
        single = explaining_single_samples(self._trainer.lightning_module, self._sizes)
        is_once = self._session.topology.pipe == 1 and self._split.num_microbatches == 1
        unstepped = optimizers.refusing_steps(self._trainer) if self._trains and not is_once else nullcontext()
        with self._log.collecting(), watch, single, unstepped:
            yield
            if self._options is not None:
                optimizers.check_options(self._trainer, self._options)
            if self._weights.is_sum and batch.has_loss:
                self._log.add_up([loss_of(batch.results[m]) for m in range(self._split.num_microbatches)])

    def merge(self, batch: Batch) -> Any:
        """Store what the steps have collected as if the step had run once, and return what it would have returned.

        Called by all ranks that share the micro-batches.
        """
        session, split, weights = self._session, self._split, self._weights
        left = session.collections.end_batch(split.num_microbatches)
        for m, own in enumerate(left):
            own.used_collectives = m in session.collectives.used
            own.note_means(batch.results[m], self._log.means_of(split.own[m]))
        values = [(batch.results[m], own, session.loss_watch.noted(m), split.changes(m)) for m, own in enumerate(left)]
        results, collected, losses, changes = zip(*session.pipeline.splitter.by_piece(values), strict=True)
        split.store(changes)
        session.loss_watch.compare(split.pieces, split.sizes, losses, weights.in_loss)
        apart = keep_collected(session.collections, split, weights, collected)
        session.warn_of_parts(apart, split.num_microbatches)
        has_loss = self._trains and batch.has_loss
        return split.merge(results, weights.in_mean, in_loss=weights.in_loss, has_loss=has_loss)

    def _running_step(self, microbatch: int) -> RunningStep:
        piece = self._split.own[microbatch]
        is_present = self._split.pieces[piece] is not None
        samples = max(1, self._sizes[microbatch]) if is_present else 0
        weighs = is_present and self._weights.in_gradient[piece] > 0
        name = progress.step_name(self._trainer)
        return RunningStep(name, microbatch, self._split.num_microbatches, samples, weighs)

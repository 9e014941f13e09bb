"""Trains in one process what the layout trains: with a plain Trainer, which knows nothing of the strategy.

whole batches     batch of data rank 0 | of data rank 1                     the step runs once for each
micro-batches     0 | 1 | 2 | 3 | 0 | 1 | 2 | 3                             the step runs once for each
loss              the sum of their losses, weighted as the strategy weighs them

It shares with the strategy what defines the micro-batches: how a batch is cut, what counts as a weight, and which key
each random number has.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor, nn

from lightning_hanayo.checking.case import Case, RankResult
from lightning_hanayo.checking.trainings.keyed_random import KeyedRandom
from lightning_hanayo.checking.trainings.observer import Observer
from lightning_hanayo.checking.trainings.piecewise_log import PiecewiseLog
from lightning_hanayo.checking.trainings.prepare import prepare
from lightning_hanayo.checking.trainings.rank import make_loader, make_trainer, rank_of_run
from lightning_hanayo.checking.trainings.watch import ModuleWatch, RoundingWatch
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.stack import find_stack, modules_outside
from lightning_hanayo.runtime.stages.first_last import detach_tree
from lightning_hanayo.strategy.batch_split import SplitBatch, WholeSplitter
from lightning_hanayo.strategy.lightning.loaders import source_of
from lightning_hanayo.strategy.lightning.progress import batch_idx, batch_key
from lightning_hanayo.strategy.losses.loss_weight import LossWeight, LossWeighting, PieceWeights, for_model
from lightning_hanayo.strategy.run_batch import UserStep
from lightning_hanayo.strategy.user_code.collected import Collections
from lightning_hanayo.strategy.user_code.merge_collected import keep_collected


@rank_of_run
def run_reference(case: Case, num_microbatches: int, rule: LossWeight) -> RankResult:
    """Train in this process.

    Args:
        case: what is trained.
        num_microbatches: B, at most so many for each batch; 1: whole batches.
        rule: how the losses are weighed, as in `HanayoStrategy(loss_weight=...)`.
    """
    module = prepare(case, whole=True)
    steps = _PiecewiseSteps(case, num_microbatches, rule)
    accumulate, num_data = case.trainer.accumulate_grad_batches, case.topology.data
    observer = Observer(lambda _: dict(enumerate(steps.losses)), accumulate, num_data, logs=True)
    make_trainer(case, steps, observer, devices=1).fit(module, make_loader(case, 0))
    return RankResult(
        {key: value for key, value in observer.values.items() if key.kind != "log" or steps.log.has_merged(key.name)},
        stack=steps.stack,
        forward_order=tuple(steps.watch.parameters),
        changed_attributes=tuple(steps.changed_attributes),
        draws_numbers=steps.random.has_drawn,
        has_rounded=steps.rounding.has_rounded,
    )


def weigh(rows: Sequence[SplitBatch], rule: LossWeight) -> list[PieceWeights]:
    """The weights of each data rank's pieces; those in the gradient sum to 1 over all of them.

    By samples (and for sums) every data rank counts the same, otherwise by what it has.
    """
    weighting = LossWeighting(rule, 1, None)
    own = [weighting.for_training(row.pieces, row.sizes) for row in rows]
    if rule in ("samples", "sum"):
        return [PieceWeights(w.in_mean, w.in_loss, tuple(g / len(rows) for g in w.in_gradient)) for w in own]
    together = iter(weighting.for_training([piece for row in rows for piece in row.pieces], rows[0].sizes).in_gradient)
    return [PieceWeights(w.in_mean, w.in_loss, tuple(next(together) for _ in w.in_gradient)) for w in own]


class _PiecewiseSteps(Callback):
    """Replaces the module's step by one that runs it on each piece of the batches, one after another."""

    stack: str
    log: PiecewiseLog
    watch: ModuleWatch

    def __init__(self, case: Case, num_microbatches: int, rule: LossWeight) -> None:
        self.losses: list[Tensor] = []
        """of the last batch, by data rank"""
        self.changed_attributes: list[str] = []
        self.rounding = RoundingWatch(case.dtype)
        self.random = KeyedRandom(case.seed, is_keyed=case.topology.world_size > 1 or num_microbatches > 1)
        self._case = case
        self._splitter = WholeSplitter(case.options.batch_rule)
        self._num_microbatches = num_microbatches
        self._rule = rule
        self._has_run = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The module is built now."""
        stack = find_stack(pl_module, self._case.options.blocks)
        self.stack = stack.name
        self._rule = for_model(self._rule, pl_module, self._case.options.batch_dim)
        num_data = self._case.topology.data
        self.log = PiecewiseLog(pl_module, num_data)
        self.random.attach(stack.blocks)
        step = pl_module.training_step

        @wraps(step)
        def training_step(batch: Any, *arguments: Any, **keywords: Any) -> Any:
            rows = [batch, *(self._other_batch(trainer, data_rank) for data_rank in range(1, num_data))]
            return self._run(trainer, rows, lambda piece: step(piece, *arguments, **keywords))

        object.__setattr__(pl_module, "training_step", training_step)
        self.watch = ModuleWatch(pl_module)
        self._collections = Collections(pl_module, modules_outside(pl_module, stack))

    def _run(self, trainer: pl.Trainer, batches: Sequence[Any], step: UserStep) -> Any:
        source = source_of(trainer)
        rows = [self._splitter.split(batch, self._num_microbatches, source) for batch in batches]
        weights = weigh(rows, self._rule)
        results, module = [], trainer.lightning_module
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()} if len(rows) > 1 else {}
        with self.random.batch(batch_key(trainer)):
            for data_rank, (row, own) in enumerate(zip(rows, weights, strict=True)):
                with _buffers(module, buffers) if data_rank else nullcontext():
                    results.append(self._run_row(row, own, data_rank, step))
        losses = [[_loss_of(result) for result in row] for row in results]
        self.log.finish(losses if self._rule == "sum" else ())
        self.changed_attributes = self.changed_attributes or self.watch.changed_attributes()
        self.losses = [_weighted(row, own.in_loss).detach() for row, own in zip(losses, weights, strict=True)]
        all_losses = [loss for row in losses for loss in row]
        total = _weighted(all_losses, [weight for own in weights for weight in own.in_gradient])
        own, detached = weights[0], [detach_tree(result) for result in results[0]]
        first = rows[0].merge(detached, own.in_mean, in_loss=own.in_loss, has_loss=True)
        return {**first, "loss": total} if isinstance(first, Mapping) else total

    def _run_row(self, row: SplitBatch, weights: PieceWeights, data_rank: int, step: UserStep) -> list[Any]:
        """Run the step on a data rank's pieces."""
        results = []
        self._collections.begin_batch()
        for m, (piece, weight) in enumerate(zip(row.pieces, weights.in_mean, strict=True)):
            self.random.begin(data_rank, m)
            self.log.begin(data_rank, weight, _num_samples(row, m))
            self._collections.enter(m)
            with nullcontext() if self._has_run else self.rounding:
                results.append(step(piece))
            self._has_run = True
            self.random.end()
        left = self._collections.end_batch(len(results))
        for m, (own, result) in enumerate(zip(left, results, strict=True)):
            own.note_means(result, self.log.means_of(data_rank, m))
        if data_rank:  # the module holds data rank 0's
            self._collections.store({path: [] for own in left for path in own.appended}, {})
        else:
            keep_collected(self._collections, row, weights, left)
        return results

    def _other_batch(self, trainer: pl.Trainer, data_rank: int) -> Any:
        """The batch of another data rank, on its way through the module's hooks."""
        batch = self._case.batches_of(data_rank)[batch_idx(trainer)]
        batch = trainer.lightning_module.on_before_batch_transfer(batch, 0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _num_samples(row: SplitBatch, piece: int) -> int:
    """The batch size with which Lightning weighs what is logged: in whole batches what it finds itself."""
    if len(row.pieces) > 1:
        return row.sizes.parts[0][piece]
    try:
        return extract_batch_size(row.pieces[0])
    except MisconfigurationException:  # there is no tensor
        return 1


def _loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise UnsupportedError(
            f"training_step returned {type(loss).__name__}: a check needs a loss of every batch, a tensor or a "
            f"dictionary with the key 'loss'"
        )
    return loss


def _weighted(losses: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """With weight 0 not even a NaN counts: the mean over no tokens is one."""
    counted = [loss * weight for loss, weight in zip(losses, weights, strict=True) if weight]
    return torch.stack([one.reshape(()) for one in counted]).sum() if counted else losses[0] * 0.0


@contextmanager
def _buffers(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the module has copies of these buffers: another data rank's, which begins each batch with rank 0's.

    They are exchanged: the backward may need those of another data rank as they were.
    """
    own = dict(module.named_buffers())
    _assign(module, {name: buffer.clone() for name, buffer in values.items()})
    yield
    _assign(module, own)


def _assign(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    for name, buffer in values.items():
        path, _, last = name.rpartition(".")
        module.get_submodule(path)._buffers[last] = buffer

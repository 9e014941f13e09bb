"""Keeps back what a step logs for its micro-batches, merges it, and logs it once, as for one undivided batch."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hanayo.runtime.capture.user_step import missing_values_error
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch
from lightning_hanayo.strategy.lightning.torchmetrics_state import copy_state, restore_state


class LogCall(NamedTuple):
    """One call of `self.log` on a piece."""

    value: Any
    batch_size: int
    is_of_batch: bool
    """whether Lightning has read the batch size from the whole batch, as the user gave none"""
    cache: Any
    """the value of a torchmetric on this micro-batch"""


class GivenBatchSizes:
    """Finds out whether the `batch_size` that a step gives to `self.log` is a constant. Lives for one run.

    given for micro-batches of      4 samples    1 sample     a batch of 4 + 4 counts, one of 1
    batch_size=len(x)                   4            1              8, 1        the sum, as in one process
    batch_size=8, a constant            8            8             16, 16       in proportion as 8, 8 in one process
    """

    def __init__(self) -> None:
        self._num_pieces: dict[Any, int] = {}
        """of the first batch"""
        self._seen: dict[Any, tuple[set[int], set[int]]] = {}
        """sizes of pieces, and what was given for them"""
        self._has_warned = False

    def total(self, key: str, call: int, sizes: Sequence[int], given: Sequence[int]) -> int:
        """What a batch counts in the mean of `key`'s values.

        Args:
            key: of the results, with the name that the step logs.
            call: the first, second ... one with this key in the step.
            sizes: the samples of each piece that has logged.
            given: the batch size that each of them gave.
        """
        first = self._num_pieces.setdefault((key, call), len(given))
        of_pieces, numbers = self._seen.setdefault((key, call), (set(), set()))
        if len(numbers) < 2:
            of_pieces.update(sizes)
            numbers.update(given)
        is_same = len(numbers) == 1
        if is_same and len(of_pieces) > 1:
            return first * given[0]
        if is_same and len(given) != first and numbers != of_pieces and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"self.log({key.partition('.')[2]!r}, batch_size={given[0]}): a batch has {len(given)} micro-batches, "
                f"another one {first}, and all of them give this number. It is taken for the size of the micro-batch. "
                f"If it is a constant, means over the epoch differ from those of one process: leave batch_size out, "
                f"and Lightning reads the size of the batch.",
                stacklevel=2,
            )
        return sum(given)


class MicrobatchLog:
    """Merges the `self.log` calls of one batch's micro-batches.

    Means are averaged with the micro-batches' weights in the loss, sums are added, and so on. So step values, epoch
    means and `sync_dist` come out as for one batch, for values that are means (or sums, ...) over samples.

    Args:
        trainer: whose results take the merged values.
        split: the batch in pieces, some of which this rank runs.
        weights: of each piece in the mean; only their proportions matter.
        splitter: gathers from the ranks that run the other pieces.
        given: the batch sizes that steps gave for earlier batches of the run.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        split: SplitBatch,
        weights: Sequence[float],
        splitter: BatchSplitter,
        *,
        given: GivenBatchSizes,
    ) -> None:
        self._results: Any = trainer._results
        self._split = split
        self._weights = weights
        self._splitter = splitter
        self._given = given
        self._trainer = trainer
        self._saved_states: list[tuple[Metric, Any]] = []
        self._piece: int | None = 0
        self._calls: dict[str, dict[int, list[LogCall]]] = {}
        self._metrics: dict[str, Metric] = {}
        self._added: set[str] = set()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep log calls back while open; at the end merge and log them, unless the batch has failed."""
        results = self._results
        if results is None:  # predict logs nothing
            yield
            self._restore_metrics()
            return
        log = results.update_metrics
        results.update_metrics = self._keep
        try:
            yield
        finally:
            del results.update_metrics
            results.batch_size = None
            self._restore_metrics()
        for key, calls in self._gathered().items():
            for i in range(max(map(len, calls.values()))):  # a key may be logged several times in one step
                self._log_merged(key, i, {piece: own[i] for piece, own in calls.items() if i < len(own)}, log)

    def add_up(self, losses: Sequence[Tensor]) -> None:
        """Log the sum of this rank's `losses`, one per micro-batch, where the step has logged them: they are sums."""
        numbers = torch.stack([loss.detach().reshape(()) for loss in losses]).tolist()
        own = dict(zip(self._split.own, numbers, strict=True))
        for key, calls in self._calls.items():
            values = {piece: [call.value for call in of_piece] for piece, of_piece in calls.items()}
            if all(len(one) == 1 and _is_number(one[0], own[piece]) for piece, one in values.items()):
                self._added.add(key)

    def enter(self, microbatch: int | None) -> None:
        """Called before the user code of that micro-batch runs; None: what the code logs doesn't count."""
        self._restore_metrics()
        piece = None if microbatch is None else self._split.own[microbatch]
        self._piece = piece if piece is not None and self._split.pieces[piece] is not None else None
        if self._piece is None:
            metrics = (part for part in self._trainer.lightning_module.modules() if isinstance(part, Metric))
            self._saved_states = [(metric, copy_state(metric)) for metric in metrics]

    def means_of(self, piece: int) -> list[Tensor]:
        """What this rank has logged as means for a piece, once the batch has ended."""
        means = (own for key, own in self._calls.items() if self._results[key].meta.is_mean_reduction)
        return [call.value for own in means for call in own.get(piece, ()) if isinstance(call.value, Tensor)]

    def _restore_metrics(self) -> None:
        """Undo what code on a padding sample has added to metrics."""
        for metric, state in self._saved_states:
            restore_state(metric, state)
        self._saved_states = []

    def _keep(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, Tensor) and value.is_meta:
            del self._results[key]  # created for this call, on `meta`: Lightning could never move it again
            raise missing_values_error(f"self.log({key.partition('.')[2]!r})")
        self._results[key].has_reset = False
        if isinstance(value, Metric):
            self._metrics[key] = value
        calls = self._calls.setdefault(key, {})
        if self._piece is not None:
            cache = value._forward_cache if isinstance(value, Metric) else None
            calls.setdefault(self._piece, []).append(
                LogCall(value, batch_size, self._results.batch_size is not None, cache)
            )
        self._results.batch_size = None  # so that it is set again if the next call reads it

    def _gathered(self) -> dict[str, dict[int, list[LogCall]]]:
        """The calls of all ranks, by key and piece. Metric objects stay on their ranks."""
        plain = {
            key: {
                piece: [call._replace(value=None) if isinstance(call.value, Metric) else call for call in own]
                for piece, own in calls.items()
            }
            for key, calls in self._calls.items()
        }
        ranks = self._splitter.all_gather(plain)
        if len(ranks) == 1:
            return self._calls
        return {key: dict(sorted(item for rank in ranks for item in rank.get(key, {}).items())) for key in self._calls}

    def _log_merged(self, key: str, number: int, calls: dict[int, LogCall], log: Callable[..., None]) -> None:
        """Log the calls with this key, of which a step may make several: the first ones, the second ones ..."""
        metric = self._results[key]
        own_sizes = {piece: call.batch_size for piece, call in calls.items() if not call.is_of_batch}
        batch_size = next(iter(calls.values())).batch_size
        if own_sizes and metric.is_tensor and metric.meta.on_epoch and metric.meta.is_mean_reduction:
            sizes = [self._split.sizes.parts[0][piece] for piece in own_sizes]
            batch_size = self._given.total(key, number, sizes, list(own_sizes.values()))
        if metric.is_tensor:
            values = {piece: call.value for piece, call in calls.items()}
            is_sum = key in self._added and metric.meta.is_mean_reduction
            merged = sum(values.values()) if is_sum else self._merged(values, metric.meta)
            log(key, merged, batch_size)
            return
        log(key, self._metrics[key], batch_size)
        caches = {piece: call.cache for piece, call in calls.items() if isinstance(call.cache, Tensor)}
        if caches:
            metric._forward_cache = self._mean(caches)

    def _merged(self, values: dict[int, Tensor], meta: Any) -> Tensor:
        if meta.is_mean_reduction:
            return self._mean(values)
        return meta.reduce_fx(torch.stack(list(values.values())))  # type: ignore[no-any-return]

    def _mean(self, values: dict[int, Tensor]) -> Tensor:
        """Weighted mean. A piece of weight 0 doesn't count, even if its value is NaN."""
        total = sum(self._weights[piece] for piece in values)
        if len(values) == 1 or not total:
            return next(iter(values.values()))
        parts = [value * (self._weights[piece] / total) for piece, value in values.items() if self._weights[piece]]
        return torch.stack(parts).sum(0)


def _is_number(value: Any, number: float) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and float(value) == number

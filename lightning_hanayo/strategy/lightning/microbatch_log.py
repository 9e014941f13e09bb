"""The logging: what a step's micro-batches log, merged and given to Lightning once, as from one undivided batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hanayo.runtime.capture.user_step import without_values
from lightning_hanayo.strategy.lightning.internals import copy_state, restore_state
from lightning_hanayo.strategy.sharing import Sharing, Split

Call = tuple[Any, int, Any]
"""value, batch size, and a torchmetric's value on this micro-batch"""


class MicrobatchLog:
    """Keeps `self.log` calls back while the micro-batches run, and merges them.

    Means are averaged with the micro-batches' shares in the loss, sums added, and so on; so step values, epoch means
    and `sync_dist` come out as for one batch, for values that are means (or sums, ...) over samples.

    Args:
        trainer: whose results take the merged values.
        split: the batch in pieces, of which this rank plays some.
        shares: of each piece in the batch; only their proportions count.
        sharing: among the ranks that play the others.
    """

    def __init__(self, trainer: "pl.Trainer", split: Split, shares: Sequence[float], sharing: Sharing) -> None:
        self._results: Any = trainer._results
        self._split = split
        self._shares = shares
        self._sharing = sharing
        self._trainer = trainer
        self._untouched: list[tuple[Metric, Any]] = []
        self._current: int | None = 0
        self._kept: dict[str, dict[int, list[Call]]] = {}
        self._logged: dict[str, Metric] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While open, log calls are kept; at its end they are merged and passed on, unless the batch has failed."""
        results = self._results
        if results is None:  # predict logs nothing
            yield
            self._touch()
            return
        batch, give = results.batch, results.update_metrics
        results.update_metrics = self._keep
        try:
            yield
        finally:
            del results.update_metrics
            results.batch, results.batch_size = batch, None
            self._touch()
        for key, calls in self._together().items():
            for i in range(max(map(len, calls.values()))):  # a key may be logged several times in one step
                self._pass_on(key, {m: made[i] for m, made in calls.items() if i < len(made)}, give)

    def enter(self, microbatch: int | None) -> None:
        """The user code of that micro-batch runs next; None: code that counts for nothing."""
        self._touch()
        piece = None if microbatch is None else self._split.own[microbatch]
        self._current = piece if piece is not None and self._split.sizes[piece] else None
        if self._current is None:
            metrics = (part for part in self._trainer.lightning_module.modules() if isinstance(part, Metric))
            self._untouched = [(metric, copy_state(metric)) for metric in metrics]
        if self._results is not None and microbatch is not None:
            self._results.batch = self._split.played[microbatch]
            self._results.batch_size = None

    def _touch(self) -> None:
        """What a ghost's code has added to metrics is taken back."""
        for metric, state in self._untouched:
            restore_state(metric, state)
        self._untouched = []

    def _keep(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, Tensor) and value.is_meta:
            del self._results[key]  # made for this call, on `meta`: Lightning could never move it again
            raise without_values(f"self.log({key.partition('.')[2]!r})")
        self._results[key].has_reset = False
        if isinstance(value, Metric):
            self._logged[key] = value
        calls = self._kept.setdefault(key, {})
        if self._current is not None:
            cache = value._forward_cache if isinstance(value, Metric) else None
            calls.setdefault(self._current, []).append((value, batch_size, cache))

    def _together(self) -> dict[str, dict[int, list[Call]]]:
        """What all ranks have kept of their pieces; a metric is everybody's own."""
        plain = {
            key: {
                piece: [(None if isinstance(value, Metric) else value, size, cache) for value, size, cache in made]
                for piece, made in calls.items()
            }
            for key, calls in self._kept.items()
        }
        everybody = self._sharing.collect(plain)
        if len(everybody) == 1:
            return self._kept
        return {
            key: dict(sorted(item for other in everybody for item in other.get(key, {}).items())) for key in self._kept
        }

    def _pass_on(self, key: str, calls: dict[int, Call], give: Callable[..., None]) -> None:
        metric = self._results[key]
        batch_size = sum(size for _, size, _ in calls.values())
        if metric.is_tensor:
            give(key, self._merged({m: value for m, (value, _, _) in calls.items()}, metric.meta), batch_size)
            return
        give(key, self._logged[key], batch_size)
        caches = {m: cache for m, (_, _, cache) in calls.items() if isinstance(cache, Tensor)}
        if caches:
            metric._forward_cache = self._mean(caches)

    def _merged(self, values: dict[int, Tensor], meta: Any) -> Tensor:
        if meta.is_mean_reduction:
            return self._mean(values)
        return meta.reduce_fx(torch.stack(list(values.values())))  # type: ignore[no-any-return]

    def _mean(self, values: dict[int, Tensor]) -> Tensor:
        """Weighted with the shares; a micro-batch without any counts for nothing, even if its mean is NaN."""
        total = sum(self._shares[m] for m in values)
        if len(values) == 1 or not total:
            return next(iter(values.values()))
        parts = [value * (self._shares[m] / total) for m, value in values.items() if self._shares[m]]
        return torch.stack(parts).sum(0)

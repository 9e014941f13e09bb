"""The logging: what a step's micro-batches log, merged and given to Lightning once, as from one undivided batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_hanayo.runtime.user_step import without_values

Call = tuple[Any, int, Any]
"""value, batch size, and a torchmetric's value on this micro-batch"""


class MicrobatchLog:
    """Keeps `self.log` calls back while the micro-batches run, and merges them.

    Means are averaged with the micro-batches' shares in the loss, sums added, and so on; so step values, epoch means
    and `sync_dist` come out as for one batch, for values that are means (or sums, ...) over samples.

    Args:
        trainer: whose results take the merged values.
        microbatches: for their sizes.
        shares: of each in the batch; only their proportions count.
    """

    def __init__(self, trainer: "pl.Trainer", microbatches: Sequence[Any], shares: Sequence[float]) -> None:
        self._results: Any = trainer._results
        self._microbatches = microbatches
        self._shares = shares
        self._current = 0
        self._kept: dict[str, dict[int, list[Call]]] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While open, log calls are kept; at its end they are merged and passed on."""
        results = self._results
        if results is None:  # predict logs nothing
            yield
            return
        batch, give = results.batch, results.update_metrics
        results.update_metrics = self._keep
        try:
            yield
        finally:
            del results.update_metrics
            results.batch, results.batch_size = batch, None
        for key, calls in self._kept.items():
            for i in range(max(map(len, calls.values()))):  # a key may be logged several times in one step
                self._pass_on(key, {m: made[i] for m, made in calls.items() if i < len(made)}, give)

    def enter(self, microbatch: int) -> None:
        """The user code of that micro-batch runs next."""
        self._current = microbatch
        if self._results is not None:
            self._results.batch = self._microbatches[microbatch]
            self._results.batch_size = None

    def _keep(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, Tensor) and value.is_meta:
            del self._results[key]  # made for this call, on `meta`: Lightning could never move it again
            raise without_values(f"self.log({key.partition('.')[2]!r})")
        self._results[key].has_reset = False
        cache = value._forward_cache if isinstance(value, Metric) else None
        self._kept.setdefault(key, {}).setdefault(self._current, []).append((value, batch_size, cache))

    def _pass_on(self, key: str, calls: dict[int, Call], give: Callable[..., None]) -> None:
        metric = self._results[key]
        batch_size = sum(size for _, size, _ in calls.values())
        if metric.is_tensor:
            give(key, self._merged({m: value for m, (value, _, _) in calls.items()}, metric.meta), batch_size)
            return
        value = next(iter(calls.values()))[0]
        give(key, value, batch_size)
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

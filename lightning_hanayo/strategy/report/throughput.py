"""Samples, tokens and FLOPs, in all and per second, by the host's clock: nothing waits for a device."""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class Throughput:
    """Counts what one data rank trains on between two readings, for all of them. Time of evaluations doesn't count.

    Args:
        count: returns the samples of a batch.
        num_data_ranks: how many see as many samples as this one.
        flops: returns the FLOPs of a batch; 0 where they aren't known.
        totals: samples and tokens of all data ranks before; counted on.
    """

    def __init__(
        self,
        count: Callable[[Any], int],
        num_data_ranks: int,
        flops: Callable[[Any], float] = lambda _: 0.0,
        totals: dict[str, int] | None = None,
    ) -> None:
        self._count = count
        self._flops_of = flops
        self._num_data_ranks = num_data_ranks
        self._totals = {"samples": 0, "tokens": 0} if totals is None else totals
        self._begun: float | None = None
        self._paused: float | None = None
        self._since = Counter[str]()
        self._flops = 0.0

    def note(self, batch: Any) -> None:
        """A batch has been trained. The first one, in which much is set up, only begins the measurement of time."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        found = {"samples": self._count(batch), "tokens": ids.numel() if isinstance(ids, Tensor) else 0}
        for name, number in found.items():
            self._totals[name] += self._num_data_ranks * number
        if self._begun is None:
            self._begun = time.perf_counter()
        else:
            self._since.update(found)
            self._flops += self._flops_of(batch)

    def pause(self) -> None:
        """Something else than training begins."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """It has ended."""
        if self._paused is not None and self._begun is not None:
            self._begun += time.perf_counter() - self._paused
        self._paused = None

    def read(self) -> dict[str, float]:
        """The figures since the last reading and the totals, of all data ranks; without those that aren't known.

        Tokens are known where batches have `input_ids`.
        """
        now = time.perf_counter()
        seconds = 0.0 if self._begun is None else now - self._begun
        found = {f"{name}_per_s": number for name, number in self._since.items()} | {"flops_per_s": self._flops}
        self._begun, self._flops = now, 0.0
        self._since.clear()
        rates = {name: self._num_data_ranks * number / seconds for name, number in found.items() if number}
        return rates | {name: number for name, number in self._totals.items() if number}

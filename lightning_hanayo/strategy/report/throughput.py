"""Samples, tokens and FLOPs per second, by the host's clock: nothing waits for a device."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class Throughput:
    """Counts what one data rank trains on between two readings, for all of them. Time of evaluations doesn't count.

    Args:
        count: returns the samples of a batch.
        num_data_ranks: how many see as many samples as this one.
        flops: returns the FLOPs of a batch; 0 where they aren't known.
    """

    def __init__(
        self, count: Callable[[Any], int], num_data_ranks: int, flops: Callable[[Any], float] = lambda _: 0.0
    ) -> None:
        self._count = count
        self._flops_of = flops
        self._num_data_ranks = num_data_ranks
        self._begun: float | None = None
        self._paused: float | None = None
        self._samples = self._tokens = 0
        self._flops = 0.0

    def note(self, batch: Any) -> None:
        """A batch has been trained. The first one, in which much is set up, only begins the measurement."""
        if self._begun is None:
            self._begun = time.perf_counter()
            return
        self._samples += self._count(batch)
        self._flops += self._flops_of(batch)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        self._tokens += ids.numel() if isinstance(ids, Tensor) else 0

    def pause(self) -> None:
        """Something else than training begins."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """It has ended."""
        if self._paused is not None and self._begun is not None:
            self._begun += time.perf_counter() - self._paused
        self._paused = None

    def read(self) -> dict[str, float]:
        """The figures since the last reading, of all data ranks; without those that aren't known.

        Tokens are known where batches have `input_ids`.
        """
        now = time.perf_counter()
        seconds = 0.0 if self._begun is None else now - self._begun
        found = {"samples_per_s": self._samples, "tokens_per_s": self._tokens, "flops_per_s": self._flops}
        self._begun, self._samples, self._tokens, self._flops = now, 0, 0, 0.0
        return {name: self._num_data_ranks * number / seconds for name, number in found.items() if number}

"""Samples, tokens and FLOPs per second: counted for all data ranks, by a clock that evaluations stop."""

from typing import Any
from unittest.mock import patch

import torch

from lightning_hanayo.strategy import report
from lightning_hanayo.strategy.report import Throughput


def test_what_is_counted_between_two_readings() -> None:
    now = [100.0]
    batch: dict[str, Any] = {"input_ids": torch.zeros(4, 10, dtype=torch.long)}
    with patch.object(report.time, "perf_counter", lambda: now[0]):
        figures = Throughput(lambda batch: len(batch["input_ids"]), num_data_ranks=2)
        assert figures.read() == {}
        figures = Throughput(lambda batch: len(batch["input_ids"]), 2, lambda batch: 7.5 * len(batch["input_ids"]))
        for _ in range(3):  # the first one takes long, and isn't counted
            now[0] += 2.0
            figures.note(batch)
        now[0] += 50.0
        figures.skip()
        rates = {"samples_per_s": 2 * 8 / 4, "tokens_per_s": 2 * 80 / 4, "flops_per_s": 2 * 60 / 4}
        assert figures.read() == rates | {"samples": 2 * 12, "tokens": 2 * 120}
        now[0] += 1.0
        figures.note(batch)
        rates = {"samples_per_s": 8.0, "tokens_per_s": 80.0, "flops_per_s": 60.0}
        assert figures.read() == rates | {"samples": 2 * 16, "tokens": 2 * 160}

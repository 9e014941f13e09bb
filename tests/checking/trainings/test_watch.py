"""A watch sees lower precision."""

import torch

from lightning_hanayo.checking.trainings.reference import RoundingWatch


def test_rounding_is_seen() -> None:
    x, mask = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    for code, rounds in [(lambda: x.float(), True), (lambda: mask.float() * x, False), (lambda: x.double(), False)]:
        with RoundingWatch(torch.float64) as watch:
            code()
        assert watch.has_rounded is rounds

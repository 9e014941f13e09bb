"""A watch sees lower precision, and the line that draws random numbers."""

import torch

from lightning_hanayo.checking.trainings import StepWatch


def test_rounding_is_seen() -> None:
    x, mask = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    for code, rounds in [(lambda: x.float(), True), (lambda: mask.float() * x, False), (lambda: x.double(), False)]:
        with StepWatch(torch.float64) as watch:
            code()
        assert watch.has_rounded is rounds


def test_the_first_line_that_draws_is_named() -> None:
    x = torch.ones(2)
    with StepWatch(torch.float64) as watch:
        torch.nn.functional.dropout(x, 0.0)
        torch.nn.functional.scaled_dot_product_attention(*x.reshape(1, 1, 1, 2).repeat(3, 1, 1, 1))
        assert not watch.draws_at
        torch.empty_like(x).exponential_()
        torch.rand_like(x)
    assert "test_watch.py" in watch.draws_at and "(torch.empty_like(x).exponential_())" in watch.draws_at

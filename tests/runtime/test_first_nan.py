"""The operation that makes the first NaN is found, also in place; memory that is not written yet is none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_hanayo.pipeline_parallel.nan import FirstNaN

FOUND: list[tuple[Callable[[Tensor], object], str]] = [
    (lambda x: (x - 2).log().exp(), "aten.log.default in here"),
    (lambda x: x.sub_(2).sqrt_() + 1, "aten.sqrt_.default in here"),
    (lambda x: torch.zeros(2) / torch.zeros(2) + x, "aten.div.Tensor in here"),
    (lambda x: (x * torch.nan).nan_to_num(), "aten.mul.Tensor in here"),
    (lambda x: torch.zeros_like(x).fill_(torch.nan).fill_(1.0), "aten.fill_.Scalar in here"),
    (lambda x: (x / 0).log(), ""),
]


@pytest.mark.parametrize(("run", "found"), FOUND)
def test_the_first_operation_is_found(run: Callable[[Tensor], object], found: str) -> None:
    with FirstNaN(lambda: "here") as nan:
        run(torch.ones(2))
    assert nan.found == found

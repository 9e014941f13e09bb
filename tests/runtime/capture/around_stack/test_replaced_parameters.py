"""A step that reaches the stack with other parameters in its modules is an error that names one of them."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.user_step import ReplacedParameters


class Checks(nn.Module):
    """Its forward stands for a call of the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(2, 2)
        self.check = ReplacedParameters(self)

    def forward(self) -> None:
        self.check.check()


def test_other_parameters_are_refused() -> None:
    model = Checks()
    model.check.begin_batch()
    model()
    with pytest.raises(UnsupportedError, match="head.weight is replaced while the stack is called .*functional_call"):
        functional_call(model, {"head.weight": torch.ones(2, 2)}, ())
    model()


def test_parameters_may_be_replaced_between_batches() -> None:
    model = Checks()
    model.head.weight = nn.Parameter(torch.ones(2, 2))
    model.check.begin_batch()
    model()

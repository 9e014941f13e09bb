"""Calls that mix the samples of a micro-batch [4, 3]."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_hanayo.strategy.losses.sample_mixing import noting_mixed_samples

MIXES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.roll(1, 0),
    lambda x: x.roll(1),
    lambda x: x.roll(shifts=1, dims=0),
    lambda x: torch.roll(x, 1, 0),
    lambda x: torch.roll(x, (1, 1), dims=(0, 1)),
    lambda x: x.flip(0),
    lambda x: x.flip((0, 1)),
    lambda x: x.flip([-2]),
    lambda x: torch.flip(x, [0]),
    lambda x: x[torch.randperm(4)],
    lambda x: x[torch.randperm(n=4)],
]
OTHERS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.roll(1, 1),
    lambda x: x.flip(-1),
    lambda x: torch.flip(x, dims=(1,)),
    lambda x: x[:, torch.randperm(3)],
    lambda x: x.T.roll(1, 0),
]


def found_in(call: Callable[[Tensor], Tensor]) -> list[str]:
    found: dict[str, None] = {}
    with noting_mixed_samples([4], 0, found):
        call(torch.ones(4, 3))
    return list(found)


@pytest.mark.parametrize("call", MIXES)
def test_mixing_is_noted(call: Callable[[Tensor], Tensor]) -> None:
    assert len(found_in(call)) == 1


@pytest.mark.parametrize("call", OTHERS)
def test_other_calls_are_not(call: Callable[[Tensor], Tensor]) -> None:
    assert found_in(call) == []


def test_torch_is_as_before_afterwards() -> None:
    before = torch.roll, torch.flip, torch.randperm, Tensor.roll, Tensor.flip, vars(Tensor).get("roll")
    found_in(lambda x: x.roll(1, 0))
    assert (torch.roll, torch.flip, torch.randperm, Tensor.roll, Tensor.flip, vars(Tensor).get("roll")) == before

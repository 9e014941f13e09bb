"""A watch sees the order of the forward, changed attributes, and lower precision."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.checking.trainings.reference import ModuleWatch, RoundingWatch


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.first = nn.Linear(2, 2), nn.Linear(2, 2)
        self.count, self.seen, self.same, self.stored = 0, [], 1.0, torch.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(1)
        self.same = 1.0
        self.stored = self.last(self.first(x))
        return self.stored


def test_parameters_are_named_in_the_order_of_the_forward() -> None:
    model = Model()
    watch = ModuleWatch(model)
    model(torch.ones(2))
    assert list(watch.parameters) == ["first.weight", "first.bias", "last.weight", "last.bias"]


def test_changed_attributes_are_named() -> None:
    outer: Any = nn.Sequential(Model(), Model())
    watch = ModuleWatch(outer)
    outer[1](torch.ones(2))
    assert watch.changed_attributes() == ["1.count", "1.seen", "1.stored"]
    assert not outer[1].first._forward_pre_hooks, "the watch has ended"


def test_rounding_is_seen() -> None:
    x, mask = torch.ones(2, dtype=torch.float64), torch.ones(2, dtype=torch.bool)
    for code, rounds in [(lambda: x.float(), True), (lambda: mask.float() * x, False), (lambda: x.double(), False)]:
        with RoundingWatch(torch.float64) as watch:
            code()
        assert watch.has_rounded is rounds

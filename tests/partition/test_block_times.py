"""The profile times blocks and the rest, and leaves the model as it was."""

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.partition import block_times as module
from lightning_hanayo.partition.stack import find_stack


class Clock:
    now = 0.0


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.norm = seconds, nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        Clock.now += self.seconds
        return nn.functional.dropout(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.blocks = nn.ModuleList(Slow(seconds) for seconds in (1.0, 4.0, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        Clock.now += 3.0
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_seconds_and_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_clock", lambda: Clock.now)
    model = Model()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    stack = find_stack(model)
    assert module.profile(model, stack, lambda: model(torch.randn(4, 3))) == ([1.0, 4.0, 2.0], 3.0)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in stack.blocks)

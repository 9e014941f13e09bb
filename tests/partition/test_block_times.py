"""Block times are measured for each block and the rest, and the model is unchanged afterwards."""

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.partition import block_times
from lightning_hanayo.partition.stack import find_stack


class FakeClock:
    now = 0.0


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.norm = seconds, nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        FakeClock.now += self.seconds
        return nn.functional.dropout(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.blocks = nn.ModuleList(Slow(seconds) for seconds in (1.0, 4.0, 2.0))

    def forward(self, x: Tensor) -> Tensor:
        FakeClock.now += 3.0
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


def test_seconds_are_measured_and_the_model_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_times, "_clock", lambda: FakeClock.now)
    model = Model()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    stack = find_stack(model)
    assert block_times.measure_block_times(model, stack, lambda: model(torch.randn(4, 3))) == ([1.0, 4.0, 2.0], 3.0)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in stack.blocks)

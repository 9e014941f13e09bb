"""Measuring block times leaves the model unchanged, and has one block at a time on the device.

device  | outside | 0 | outside | 1 | outside | 2 | outside |       a fake clock advances with the work, not with moves
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.clock import Clock
from lightning_hanayo.partition.block_times import measure_block_times
from lightning_hanayo.partition.stack import find_stack

CPU = torch.device("cpu")


class FakeClock(Clock):
    now = 0.0

    @override
    def mark(self) -> float:
        return FakeClock.now

    @override
    def seconds(self, marks: Sequence[float]) -> list[float]:
        return list(marks)


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


def test_seconds_are_measured_and_the_model_is_unchanged() -> None:
    model = Model()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    stack = find_stack(model)
    measured = measure_block_times(model, stack, lambda: model(torch.randn(4, 3)), CPU, FakeClock())
    assert measured == ([1.0, 4.0, 2.0], 3.0)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in stack.blocks)


def test_one_block_at_a_time_is_on_the_device_and_the_rest_of_the_model_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, device = Model(), torch.device("cpu:0")  # a copy on it is another tensor
    home = {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()}
    monkeypatch.setattr(Tensor, "to", lambda tensor, _: tensor.clone())
    moved: list[list[str]] = []

    def note(_: nn.Module, __: object) -> None:
        now = model.state_dict(keep_vars=True).items()
        moved.append([name for name, tensor in now if tensor.data_ptr() != home[name] and name.endswith("weight")])

    for block in model.blocks:
        block.norm.register_forward_pre_hook(note)
    times, outside = measure_block_times(
        model, find_stack(model), lambda: model(torch.randn(4, 3)), device, FakeClock()
    )
    assert (times, outside) == ([1.0, 4.0, 2.0], 3.0)
    assert moved[:3] == [["norm.weight", f"blocks.{i}.norm.weight"] for i in range(3)]
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict(keep_vars=True).items()} == home
    assert int(model.norm.num_batches_tracked) == 0

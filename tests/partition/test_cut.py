"""The cut has the lowest possible maximum cost of a stage; measuring block times leaves the model unchanged.

costs 1 1 1 1 1, last stage + 1:   | 1 1 1 | 1 1 +1 |
"""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor, nn

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.partition import cut as module
from lightning_hanayo.partition.cut import cut, measure_block_times
from lightning_hanayo.partition.stack import find_stack


def cost(costs: list[int], stages: list[range], last: int) -> int:
    return max(sum(costs[i] for i in run) + (last if run is stages[-1] else 0) for run in stages)


def all_cuts(count: int, num_stages: int) -> list[list[range]]:
    borders = ((0, *inner, count) for inner in combinations(range(1, count), num_stages - 1))
    return [[range(a, b) for a, b in pairwise(border)] for border in borders]


@given(some.lists(some.integers(0, 20), min_size=1, max_size=8), some.data(), some.integers(0, 30))
def test_no_cut_is_better(costs: list[int], data: some.DataObject, last: int) -> None:
    num_stages = data.draw(some.integers(1, len(costs)))
    found = cut(costs, num_stages, last=last)
    assert [i for run in found for i in run] == list(range(len(costs))) and all(found)
    assert cost(costs, found, last) == min(cost(costs, each, last) for each in all_cuts(len(costs), num_stages))


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "lengths"), [(8, 4, [2, 2, 2, 2]), (8, 8, [1] * 8), (5, 1, [5]), (12, 8, None)]
)
def test_equal_blocks_are_cut_evenly(num_blocks: int, num_stages: int, lengths: list[int] | None) -> None:
    found = [len(run) for run in cut([1.0] * num_blocks, num_stages)]
    assert found == lengths if lengths else sorted(found) == [1] * 4 + [2] * 4


def test_with_a_huge_head_the_last_stage_has_one_block() -> None:
    assert [len(run) for run in cut([1] * 8, 4, last=1000)][-1] == 1


def test_fewer_blocks_than_stages_are_refused() -> None:
    with pytest.raises(HanayoError, match="3 blocks can't fill 4 stages"):
        cut([1, 1, 1], 4)


def test_costs_outside_the_stack_count_for_the_first_and_last_stage() -> None:
    assert cut([1.0] * 8, 2, last=4.0) == [range(6), range(6, 8)]
    assert cut([1.0] * 8, 2, first=4.0) == [range(2), range(2, 8)]


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
    monkeypatch.setattr(module, "_clock", lambda: FakeClock.now)
    model = Model()
    before, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    stack = find_stack(model)
    assert measure_block_times(model, stack, lambda: model(torch.randn(4, 3))) == ([1.0, 4.0, 2.0], 3.0)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in stack.blocks)

"""The cargo: equal calls travel once, and a tensor no farther than to the last block that takes it.

block     0 (local)   1          2          3
call        (h, m)    (h, m)     (h, n)     (h,)
behind it  h m n      h m n      h m n      h         m with block 1's call, n with block 2's
"""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.capture.forward_patch import install, remove
from lightning_hanayo.runtime.capture.stage_input import StageInput
from lightning_hanayo.runtime.capture.user_step import UserStep

M, N = torch.full((2,), 2.0), torch.full((2,), 3.0)


class Add(nn.Module):
    def forward(self, x: Tensor, other: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return x if other is None else x + scale * other


@pytest.fixture
def blocks() -> Iterator[list[nn.Module]]:
    found = [Add() for _ in range(4)]
    install(found)
    yield found
    remove(found)


def opened(blocks: list[nn.Module], calls: list[tuple[Tensor, ...]]) -> StageInput:
    """The cargo of a step that calls the blocks so, the first one on this rank."""

    def step(_: int) -> Tensor:
        x = torch.ones(2)
        for block, others in zip(blocks, calls, strict=True):
            x = block(x, *others, scale=2.0)
        return x

    user = UserStep(blocks, 1, "blocks")
    try:
        return StageInput.of(user.open(Batch(step=step), 0))
    finally:
        user.stop()


def test_each_tensor_goes_as_far_as_it_is_used(blocks: list[nn.Module]) -> None:
    cargo = opened(blocks, [(M,), (M,), (N,), ()])
    held = [len(cargo.packet.tensors)]
    for block in blocks[1:]:
        cargo = StageInput.of(cargo.through([block]).packet)
        held.append(len(cargo.packet.tensors))
    assert held == [3, 2, 1, 1]
    assert torch.equal(cargo.output, 1 + 2 * (M + M + N))


def test_equal_calls_travel_once(blocks: list[nn.Module]) -> None:
    cargo = opened(blocks, [(N,), (N,), (M,), (M,)])  # the first one gets a value, the others its successor
    assert (len(cargo.calls), cargo.which, len(cargo.tensors)) == (2, (0, 1, 1), 3)


def test_several_blocks_at_once(blocks: list[nn.Module]) -> None:
    whole = opened(blocks, [(M,), (M,), (N,), (M,)]).through(blocks[1:])
    assert torch.equal(whole.output, 1 + 2 * (M + M + N + M)) and whole.which == ()


def test_a_stage_without_blocks_hands_on(blocks: list[nn.Module]) -> None:
    cargo = opened(blocks, [(M,), (), (), ()])
    assert cargo.through([]) is cargo

"""The stage input: equal calls are sent once, and a tensor only as far as the last block that uses it.

block     0 (local)   1          2          3
call        (h, m)    (h, m)     (h, n)     (h,)
behind it  h m n      h m n      h m n      h         m with block 1's call, n with block 2's
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.carriers import FilledArguments
from lightning_hanayo.pipeline_parallel.capture.forward_patch import patch_blocks, unpatch_blocks
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep

M, N = torch.full((2,), 2.0), torch.full((2,), 3.0)


class Add(nn.Module):
    def forward(self, x: Tensor, other: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        return x if other is None else x + scale * other


@pytest.fixture
def blocks() -> Iterator[list[nn.Module]]:
    found = [Add() for _ in range(4)]
    patch_blocks(found)
    yield found
    unpatch_blocks(found)


def started(blocks: list[nn.Module], calls: list[tuple[Tensor, ...]]) -> StageInput:
    """The stage input of a step that calls the blocks so; only the first block is on this rank."""

    def step(_: int) -> Tensor:
        x = torch.ones(2)
        for block, others in zip(blocks, calls, strict=True):
            x = block(x, *others, scale=2.0)
        return x

    user = UserStep(blocks, 1, "blocks")
    try:
        return StageInput.from_message(user.begin_pass(Batch(step=step), 0))
    finally:
        user.close()


def test_each_tensor_is_sent_as_far_as_it_is_used(blocks: list[nn.Module]) -> None:
    stage_input = started(blocks, [(M,), (M,), (N,), ()])
    held = [len(stage_input.message.tensors)]
    for block in blocks[1:]:
        stage_input = StageInput.from_message(stage_input.run([block]).message)
        held.append(len(stage_input.message.tensors))
    assert held == [3, 2, 1, 1]
    assert torch.equal(stage_input.output, 1 + 2 * (M + M + N))


def test_equal_calls_are_sent_once(blocks: list[nn.Module]) -> None:
    stage_input = started(blocks, [(N,), (N,), (M,), (M,)])  # the first one gets a value, the others its successor
    assert (len(stage_input.calls), stage_input.call_of_block, len(stage_input.tensors)) == (2, (0, 1, 1), 3)


def test_several_blocks_at_once(blocks: list[nn.Module]) -> None:
    whole = started(blocks, [(M,), (M,), (N,), (M,)]).run(blocks[1:])
    assert torch.equal(whole.output, 1 + 2 * (M + M + N + M)) and whole.call_of_block == ()


def test_an_output_is_sent_as_far_as_a_later_block_gets_it() -> None:
    """block 3 gets the output of block 1: x, 2x, 4x, 4x + 2 * 2x"""
    blocks: list[nn.Module] = [Add() for _ in range(5)]
    patch_blocks(blocks)

    def step(_: int) -> Tensor:
        first = blocks[0](torch.ones(2))
        second = blocks[1](first, first, scale=1.0)
        third = blocks[2](second, second, scale=1.0)
        fourth = blocks[3](third, second, scale=2.0)
        return blocks[4](fourth, first)

    user = UserStep(blocks, 1, "blocks")
    stage_input = StageInput.from_message(user.begin_pass(Batch(step=step), 0))
    user.close()
    held, alone = [], []
    whole = stage_input.run(blocks[1:])
    for block in blocks[1:]:
        stage_input = StageInput.from_message(stage_input.run([block]).message)
        held.append(len(stage_input.message.tensors))
        alone.append(stage_input.output[0].item())
    unpatch_blocks(blocks)
    assert alone == [2.0, 4.0, 8.0, 9.0] and torch.equal(whole.output, stage_input.output)
    assert held == [2, 3, 2, 1]


class Collects(nn.Module):
    def forward(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        state["seen"].append(x)
        return x


class Counts(nn.Module):
    def forward(self, x: Tensor, state: dict[str, Any]) -> Tensor:
        state["sum"] = state["sum"] + x
        return x + state["sum"]


def first_input(blocks: list[nn.Module], call: Callable[[int, nn.Module, Tensor], Tensor]) -> StageInput:
    """The input of the stage after the first block, in a step that calls each block by its number."""

    def step(_: int) -> Tensor:
        x = torch.ones(2)
        for index, block in enumerate(blocks):
            x = call(index, block, x)
        return x

    patch_blocks(blocks)
    user = UserStep(blocks, 1, "blocks")
    stage_input = StageInput.from_message(user.begin_pass(Batch(step=step), 0))
    user.close()
    unpatch_blocks(blocks)
    return stage_input


def test_a_dictionary_is_filled_from_stage_to_stage() -> None:
    """x + sum:  1 + 1 = 2, 2 + 3 = 5, 5 + 8 = 13, 13 + 21 = 34"""
    blocks: list[nn.Module] = [Counts() for _ in range(4)]
    state: dict[str, Any] = {"sum": torch.zeros(2), "other": 1}
    stage_input = first_input(blocks, lambda _, block, x: block(x, state))
    carriers = (FilledArguments(),)
    stage_input = stage_input.after([stage_input.output], 0, (None,))
    whole = stage_input.run(blocks[1:], carriers)
    for block in blocks[1:]:
        stage_input = StageInput.from_message(stage_input.run([block], carriers).message)
    assert whole.output[0].item() == stage_input.output[0].item() == 34
    ((number, items),) = stage_input.trees[0].items()
    assert number == 0 and items.keys() == {"sum"} and items["sum"][0].item() == 21
    assert state["sum"][0].item() == 1, "what the first block, in the step, has put in"


def test_a_dictionary_that_the_step_changes_must_not_be_filled() -> None:
    blocks: list[nn.Module] = [Counts() for _ in range(3)]
    state: dict[str, Any] = {"sum": torch.zeros(2)}
    stage_input = first_input(blocks, lambda index, block, x: block(x, state | {"index": index}))
    assert stage_input.run(blocks[1:2]).output.shape == (2,), "each call has a dictionary of its own"
    stage_input = first_input(blocks, lambda index, block, x: block(x, state.update(index=index) or state))
    with pytest.raises(UnsupportedError, match="a Counts of the stack changes a dict that it gets as an argument"):
        stage_input.run(blocks[1:])


def test_a_list_that_a_block_changes_is_refused() -> None:
    blocks: list[nn.Module] = [Collects() for _ in range(2)]
    state: dict[str, Any] = {"seen": []}
    stage_input = first_input(blocks, lambda _, block, x: block(x, state))
    with pytest.raises(UnsupportedError, match="a Collects of the stack changes a list that it gets as an argument"):
        stage_input.run(blocks[1:])


def test_an_output_of_another_step_is_refused(blocks: list[nn.Module]) -> None:
    kept: list[Tensor] = []

    def step(_: int) -> Tensor:
        x = blocks[1](blocks[0](M))
        kept.append(x)
        return blocks[3](blocks[2](kept[0]))

    user = UserStep(blocks, 1, "blocks")
    user.begin_pass(Batch(step=step), 0)
    with pytest.raises(
        UnsupportedError, match=r"argument 0 of blocks\[2\] is the output of a block in another pass or step"
    ):
        user.begin_pass(Batch(step=step), 1)
    user.close()


def test_a_stage_without_blocks_changes_nothing(blocks: list[nn.Module]) -> None:
    stage_input = started(blocks, [(M,), (), (), ()])
    assert stage_input.run([]) is stage_input

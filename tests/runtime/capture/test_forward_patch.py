"""The bridge lies on the instances: copies cross their own, and it comes off as if it had never been there."""

import copy
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.capture.forward_patch import patch_blocks, unpatch_blocks


class Block(nn.Module):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def doubled(self: Any, x: Tensor) -> Tensor:
    return 2 * self.linear(x)


X = torch.ones(1, 2)


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_a_copy_uses_its_own_weights(twin: Any) -> None:
    block = Block()
    patch_blocks([block])
    other = twin(block)
    with torch.no_grad():
        block.linear.weight.zero_(), block.linear.bias.zero_()
    assert block(X).abs().sum() == 0 and other(X).abs().sum() > 0
    assert other.forward.__self__ is other


@pytest.mark.parametrize("own", [False, True], ids=["class's forward", "instance's own forward"])
def test_comes_off(own: bool) -> None:
    block = Block()
    if own:
        block.forward = MethodType(doubled, block)
    before, expected = dict(vars(block)), block(X)
    for _ in range(2):
        patch_blocks([block])
    assert torch.equal(block(X), expected)
    for _ in range(2):
        unpatch_blocks([block])
    assert torch.equal(block(X), expected) and vars(block).keys() == before.keys()


def test_another_ranks_block_says_so() -> None:
    block = Block().to("meta")
    patch_blocks([block])
    with pytest.raises(UnsupportedError, match="a Block of the pipelined stack was called outside a training"):
        block(X)


@pytest.mark.filterwarnings("ignore")
def test_a_block_compiled_in_place_is_met_before_its_compiled_code() -> None:
    torch._dynamo.reset()
    block, calls = Block(), []
    expected = block(X)

    def backend(graph: Any, _: Any) -> Any:
        return lambda *args: calls.append(1) or graph.forward(*args)

    block.compile(backend=backend, fullgraph=True)
    compiled = block._compiled_call_impl
    patch_blocks([block])
    assert torch.equal(block(X), expected) and len(calls) == 1
    assert torch.equal(copy.deepcopy(block)(X), expected) and len(calls) == 1  # copies are not compiled
    unpatch_blocks([block])
    assert block._compiled_call_impl is compiled
    assert torch.equal(block(X), expected) and len(calls) == 2

"""The patch is on the instances: copies use their own weights, and unpatching restores everything."""

import copy
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.forward_patch import patch_blocks, unpatch_blocks


class Block(nn.Module):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def doubled(self: Any, x: Tensor) -> Tensor:
    return 2 * self.linear(x)


X = torch.ones(1, 2)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_a_copy_uses_its_own_weights(duplicate: Any) -> None:
    block = Block()
    patch_blocks([block])
    other = duplicate(block)
    with torch.no_grad():
        block.linear.weight.zero_(), block.linear.bias.zero_()
    assert block(X).abs().sum() == 0 and other(X).abs().sum() > 0
    assert other.forward.__self__ is other


@pytest.mark.parametrize("own", [False, True], ids=["class's forward", "instance's own forward"])
def test_unpatching_restores_the_block(own: bool) -> None:
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


def test_a_block_of_another_rank_raises_an_error() -> None:
    block = Block().to("meta")
    patch_blocks([block])
    with pytest.raises(UnsupportedError, match="a Block of the pipelined stack was called outside a step"):
        block(X)


@pytest.mark.filterwarnings("ignore")
def test_the_tracer_is_asked_before_a_blocks_compiled_code() -> None:
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


def test_a_block_runs_as_written_where_dynamo_has_given_up() -> None:
    """So it does after several recompilations, or with TORCH_COMPILE_DISABLE=1."""
    block = Block()
    expected = block(X)
    block.compile(backend="eager")
    patch_blocks([block])
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(block(X), expected)
    assert torch.equal(block(X), expected)

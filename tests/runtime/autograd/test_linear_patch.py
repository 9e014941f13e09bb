"""The patch of linear layers: which layers it takes, and that nothing else about them changes."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.pipeline_parallel import split_backward
from lightning_hanayo.pipeline_parallel.capture import forward_patch
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from tests.runtime.queued_bytes import queued_bytes


class Adapter(nn.Linear):
    """A user's subclass."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.adapter = Adapter(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)  # its own subclass of Linear, used by its weight alone
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.norm(self.linear(input=x)))


def patched(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if "forward" in vars(part)]


def test_exact_linear_layers_are_patched() -> None:
    from transformers.pytorch_utils import Conv1D

    block = Block()
    block.conv = Conv1D(4, 4)
    split_backward.patch_linear_layers([block], WeightGradientQueue())
    assert patched(block) == ["linear", "conv"]


def test_names_parameters_and_repr_stay() -> None:
    block = Block()
    before = (repr(block), list(block.state_dict()), dict(block.named_parameters()))
    split_backward.patch_linear_layers([block], WeightGradientQueue())
    assert (repr(block), list(block.state_dict()), dict(block.named_parameters())) == before
    assert type(block.linear) is nn.Linear
    split_backward.unpatch_linear_layers([block])
    assert patched(block) == [] and vars(block.linear).keys() == vars(nn.Linear(4, 4)).keys()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_are_ordinary(duplicate: object) -> None:
    block, queue = Block(), WeightGradientQueue()
    split_backward.patch_linear_layers([block], queue)
    duplicate = duplicate(block)  # type: ignore[operator]
    with queue.collecting(0):
        duplicate(torch.ones(1, 4)).sum().backward()
    assert queued_bytes(queue) == 0
    assert duplicate.linear.weight.grad is not None and block.linear.weight.grad is None
    split_backward.patch_linear_layers([duplicate], queue)  # a copy may be patched in its turn
    with queue.collecting(0):
        duplicate(torch.ones(1, 4)).sum().backward()
    assert queued_bytes(queue) > 0


def test_a_pickled_conv1d_is_ordinary() -> None:
    from transformers.pytorch_utils import Conv1D

    block = nn.Sequential(Conv1D(3, 4))
    split_backward.patch_linear_layers([block], WeightGradientQueue())
    assert torch.equal(pickle.loads(pickle.dumps(block))(torch.ones(1, 4)), block(torch.ones(1, 4)))


def test_kept_parameters_and_foreign_patches_are_left_alone() -> None:
    one, two = Block(), Block()
    two.linear.forward = lambda input: input
    split_backward.patch_linear_layers([one, two], WeightGradientQueue(), keep={one.linear.weight})
    assert patched(one) == [] and vars(two.linear)["forward"].__name__ == "<lambda>"
    split_backward.unpatch_linear_layers([one, two])
    assert "forward" in vars(two.linear)


def test_a_block_that_is_a_linear_layer_has_both_patches() -> None:
    block, queue = nn.Linear(4, 4), WeightGradientQueue()
    split_backward.patch_linear_layers([block], queue)
    forward_patch.patch_blocks([block])
    with queue.collecting(0):
        block(torch.ones(1, 4)).sum().backward()
    assert block.weight.grad is None and queued_bytes(queue) > 0
    forward_patch.unpatch_blocks([block])
    split_backward.unpatch_linear_layers([block])
    assert "forward" not in vars(block)

"""A middle stage holds the graph of what it has sent, and not the values.

forward   received -> blocks -> message      sent and dropped: its memory is free
backward  gradients -> .......... -> gradients of what was received
"""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import Proxy
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput
from lightning_hanayo.pipeline_parallel.p2p import Message, gradient_message, unpack_gradients
from lightning_hanayo.pipeline_parallel.pytree import Flattener
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import MiddleStage


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Block(nn.Module):
    """A linear layer and what `end` makes of its output."""

    def __init__(self, end: Callable[["Block", Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(3, 3), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self, x + self.linear(x))


def hooked(block: Block, x: Tensor) -> Tensor:
    y = x + 1
    y.register_hook(lambda gradient: gradient * 3)
    return y


FREED: dict[str, Callable[[Block, Tensor], Any]] = {
    "a sum": lambda block, x: x + 1,
    "autograd.Function": lambda block, x: Twice.apply(x),
    "a view": lambda block, x: (x + 1).view(3, 2).t(),
    "changed in place": lambda block, x: (x + 1).mul_(2),
    "two outputs": lambda block, x: (x + 1, x * 2),
    "parts of one": lambda block, x: (x + 1).chunk(2),
    "one without a gradient": lambda block, x: (x + 1, x.argmax(-1)),
    "checkpointed": lambda block, x: checkpoint(lambda y: block.linear(y).sin() + 1, x, use_reentrant=False),
    "with a hook": hooked,
}
KEPT: dict[str, Callable[[Block, Tensor], Any]] = {
    "saved by its function": lambda block, x: x.exp(),
    "a parameter": lambda block, x: (x + 1, block.linear.weight),
    "the same twice": lambda block, x: (x.exp(),) * 2,
}


def run(block: Block, values: Tensor) -> tuple[list[Tensor | None], bool]:
    """The gradients of input and parameters, and whether the outputs were freed between forward and backward."""
    stage = MiddleStage(blocks=[block], queue=WeightGradientQueue())
    call = Flattener().flatten(((Proxy(),), {}))
    received = StageInput(("tensor", 0), (call,), (0,), tensors=(values.clone().requires_grad_(),)).message
    made = stage.forward(Batch(), 0, received)
    assert made is not None
    gradients = gradient_message([torch.linspace(1, 2, t.numel()).view(t.shape) for t in made.differentiable])
    memory = [weakref.ref(tensor.untyped_storage()) for tensor in made.tensors]
    del made
    freed = all(one() is None for one in memory)
    sent_back = stage.backward(Batch(), 0, gradients)
    assert isinstance(sent_back, Message)
    return [*unpack_gradients(sent_back), *(parameter.grad for parameter in block.parameters())], freed


def expected(block: Block, values: Tensor) -> list[Tensor | None]:
    x = values.clone().requires_grad_()
    made = block(x)
    outputs = made if isinstance(made, tuple) else (made,)
    unique = list(dict.fromkeys(output for output in outputs if output.requires_grad))
    torch.autograd.backward(unique, [torch.linspace(1, 2, t.numel()).view(t.shape) for t in unique])
    return [x.grad, *(parameter.grad for parameter in block.parameters())]


@pytest.mark.parametrize("name", [*FREED, *KEPT])
def test_what_is_sent_is_freed_and_gradients_are_the_same(name: str) -> None:
    block, values = Block((FREED | KEPT)[name]), torch.randn(2, 3)
    gradients, freed = run(block, values)
    block.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected(block, values), strict=True))
    assert freed == (name in FREED)


def test_an_output_that_the_block_keeps_has_its_gradient() -> None:
    kept = []

    def keep(block: Block, x: Tensor) -> Tensor:
        y = x + 1
        y.retain_grad()
        kept.append(y)
        return y

    run(Block(keep), torch.randn(2, 3))
    assert torch.equal(kept[0].grad, torch.linspace(1, 2, 6).view(2, 3))

"""Gradients that the step takes: exact before and after the stack, refused through it, of a micro-batch for parameters.

x --embedding-- e --stack-- o --head-- s        grad(e, x), grad(s, o) are computed; grad(s, e), grad(s, x) refused
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.forward_patch import patch_blocks, unpatch_blocks
from lightning_hanayo.pipeline_parallel.capture.stage_input import StageInput
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep

grad = torch.autograd.grad
Step = Callable[["Model", Tensor], Any]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))

    def stack(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.embedding(x)))


def run(step: Step, num_pieces: int = 1) -> Any:
    """Run a step; its second block runs as on another rank, and its output is the beginning of a new graph."""
    model, x = Model(), torch.ones(3, 2, requires_grad=True)
    blocks = list(model.blocks)
    patch_blocks(blocks)
    user = UserStep(blocks, 1, "blocks")
    batch = Batch(step=lambda _: step(model, x), loss_weights=[1 / num_pieces] * num_pieces)
    try:
        made = StageInput.from_message(user.begin_pass(batch, 0).detached()).run(blocks[1:])
        user.resume(batch, 0, made.output, ())
        return batch.results[0]
    finally:
        user.close()
        unpatch_blocks(blocks)


def sum_of(model: Model, x: Tensor) -> Tensor:
    return model.head(model.stack(x)).sum()


def before(model: Model, x: Tensor) -> Tensor:
    return sum_of(model, x) + grad(model.embedding(x).sum(), x, create_graph=True)[0].sum()


def after(model: Model, x: Tensor) -> Tensor:
    output = model.stack(x)
    return grad(model.head(output).sum(), output, create_graph=True)[0].sum()


def before_but_called_after(model: Model, x: Tensor) -> Tensor:
    early = model.embedding(x).sum()
    return sum_of(model, x) + grad(early, x, create_graph=True)[0].sum()


@pytest.mark.parametrize("step", [before, after, before_but_called_after])
def test_a_gradient_on_one_side_of_the_stack(step: Step) -> None:
    assert run(step).requires_grad


def to_input(model: Model, x: Tensor) -> Any:
    return grad(sum_of(model, x), x)


def to_input_with_a_skip(model: Model, x: Tensor) -> Any:
    return grad(sum_of(model, x) + x.sum(), x)


def to_embedded(model: Model, x: Tensor) -> Any:
    x = model.embedding(x)
    return grad(model.head(model.blocks[1](model.blocks[0](x))).sum(), x, allow_unused=True)


def to_parameter(model: Model, x: Tensor) -> Any:
    return grad(sum_of(model, x), model.embedding.weight)


def to_edge(model: Model, x: Tensor) -> Any:
    x = model.embedding(x)
    output = model.blocks[1](model.blocks[0](x))
    return grad(torch.autograd.graph.get_gradient_edge(output), torch.autograd.graph.get_gradient_edge(x), output)


def to_block(model: Model, x: Tensor) -> Any:
    return grad(sum_of(model, x), model.blocks[1].weight)


@pytest.mark.parametrize("step", [to_input, to_input_with_a_skip, to_embedded, to_parameter, to_edge, to_block])
def test_a_gradient_through_the_stack_is_refused(step: Step) -> None:
    with pytest.raises(UnsupportedError, match=r"test_gradient_calls.py:\d+ .* computes a gradient through the stack"):
        run(step)


def test_a_backward_in_the_step_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"calls backward\(\), but .* Return the loss"):
        run(lambda model, x: model.embedding(x).sum().backward())


def test_functions_are_as_they_were_afterwards() -> None:
    run(before)
    x = torch.ones(1, requires_grad=True)
    (2 * x).backward()
    assert x.grad is not None and x.grad.item() == 2


def of_head(model: Model, x: Tensor) -> Tensor:
    loss = sum_of(model, x)
    return loss * grad(loss, model.head.weight, retain_graph=True)[0].norm()


def of_mean(model: Model, x: Tensor) -> Tensor:
    output = model.stack(x)
    return grad(model.head(output).mean(), output, create_graph=True)[0].square().sum()


@pytest.mark.parametrize(("step", "warns"), [(of_head, True), (of_mean, True), (before, False), (after, False)])
@pytest.mark.parametrize("num_pieces", [1, 2])
def test_a_gradient_that_depends_on_the_micro_batch_warns(step: Step, warns: bool, num_pieces: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(step, num_pieces)
    assert [f"{step.__name__}" for one in caught if "which is that of a micro-batch" in str(one.message)] == (
        [step.__name__] if warns and num_pieces == 2 else []
    )


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_transforms_around_the_stack_are_refused(transform: Any) -> None:
    with pytest.raises(UnsupportedError, match="called inside a context that changes torch func level is 1, was 0"):
        run(lambda model, x: transform(lambda x: sum_of(model, x))(x))

"""A stage's graph begins at its inputs, and the graph of a loss ends at the outputs of its stage's blocks.

w -> x = w * 2 -> y = x.exp() | loss = y + u            |: stop
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_hanayo.pipeline_parallel import graph_boundary
from lightning_hanayo.pipeline_parallel.graph_boundary import DetachedInputs
from lightning_hanayo.pipeline_parallel.p2p import Message


def received(*tensors: Tensor) -> Message:
    return Message(("tuple", *(("tensor", i) for i in range(len(tensors)))), tensors)


def leaf(value: float = 2.0) -> Tensor:
    return torch.full((2,), value, requires_grad=True)


def test_reaches_nodes_up_to_the_stop() -> None:
    w, u = leaf(), leaf()
    x = w * 2
    y = x.exp()
    loss = (y + u).sum()
    nodes, leaves = graph_boundary.reachable([loss])
    assert (leaves, {n.name() for n in nodes}) == (
        {w, u}, {"SumBackward0", "AddBackward0", "ExpBackward0", "MulBackward0"},
    )  # fmt: skip
    assert y.grad_fn is not None
    nodes, leaves = graph_boundary.reachable([loss], stop=[y.grad_fn])
    assert (leaves, {n.name() for n in nodes}) == ({u}, {"SumBackward0", "AddBackward0"})
    assert graph_boundary.reachable([w])[1] == {w} and graph_boundary.reachable([torch.ones(1)]) == (set(), set())


def test_gradients_reach_the_inputs_in_order() -> None:
    mask = torch.ones(2)
    inputs = DetachedInputs(received(leaf(), mask, leaf()))
    x, m, y = inputs.message.tensors
    graph_boundary.run_backward([x * m, y], [torch.ones(2), None])
    assert m is mask and torch.equal(inputs.gradients[0], torch.ones(2)) and inputs.gradients[1] is None


def test_a_local_message_is_detached_too() -> None:
    a, mask = leaf(), torch.ones(2)
    inputs = DetachedInputs(received(a, mask, a * 2).detached())
    x, m, y = inputs.message.tensors
    graph_boundary.run_backward([x * y * m], [torch.ones(2)])
    assert m is mask and [g.tolist() for g in inputs.gradients] == [[4.0, 4.0], [2.0, 2.0]]
    assert a.grad is None, "the graph before is its stage's"


IN_PLACE: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.relu_(x), lambda x: x.mul_(3), lambda x: x.add_(1).exp_(), lambda x: x[0].mul_(3) + x[1],
    lambda x: torch.nn.functional.dropout(x, 0.0, inplace=True) * 3,
]  # fmt: skip


@pytest.mark.parametrize("work", IN_PLACE, ids=range(len(IN_PLACE)))
def test_a_block_may_change_its_input_in_place(work: Callable[[Tensor], Tensor]) -> None:
    source = leaf()
    inputs = DetachedInputs(received(source.clone().detach().requires_grad_(), leaf()))
    work(inputs.message.tensors[0]).sum().backward()
    work(source * 1).sum().backward()
    assert torch.equal(inputs.gradients[0], source.grad)


def test_without_grad_mode_there_is_no_graph() -> None:
    with torch.no_grad():
        (x,) = DetachedInputs(received(leaf())).message.tensors
        assert not x.requires_grad and graph_boundary.current_sequence_number() == 0


def test_sequence_numbers_grow() -> None:
    early = leaf() * 2
    sequence_number = graph_boundary.current_sequence_number()
    late = early * 2
    assert early.grad_fn._sequence_nr() < sequence_number <= late.grad_fn._sequence_nr()

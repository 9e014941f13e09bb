"""The two parts of a tied weight's gradient are added to each other first, as in one process.

one process   grad = (h0 + e0) + (h1 + e1)         a pipeline runs   h0  h1  e0  e1        h: head, e: embedding
"""

import pytest
import torch
from torch import nn

from lightning_hanayo.pipeline_parallel.grad_sync import TiedGradients
from tests.runtime.test_memory import Live


def test_to_the_last_bit() -> None:
    torch.manual_seed(0)
    tied, head_only = nn.Parameter(torch.randn(50)), nn.Parameter(torch.randn(50))
    head, embedding = torch.randn(4, 50), torch.randn(4, 50)
    shared = TiedGradients()
    for m in range(4):
        shared.loss_backward(m, {tied}, lambda m=m: ((tied + head_only) * head[m]).sum().backward())
    for m in range(4):
        shared.first_stage_backward(m, lambda m=m: (tied * embedding[m]).sum().backward())
    expected = torch.zeros(50)
    for m in range(4):
        expected = expected + (head[m] + embedding[m])
    assert torch.equal(tied.grad, expected)
    assert torch.equal(head_only.grad, ((head[0] + head[1]) + head[2]) + head[3])


def test_a_part_may_be_missing() -> None:
    tied = nn.Parameter(torch.ones(2))
    shared = TiedGradients()
    shared.loss_backward(0, {tied}, lambda: (tied * 2).sum().backward())
    shared.loss_backward(1, {tied}, lambda: None)
    shared.first_stage_backward(0, lambda: None)
    shared.first_stage_backward(1, lambda: (tied * 3).sum().backward())
    shared.first_stage_backward(2, lambda: None)
    assert torch.equal(tied.grad, torch.full((2,), 5.0))


@pytest.mark.parametrize(("in_order", "expected"), [(True, 4), (False, 1)])
def test_parts_are_kept_for_their_order_alone(in_order: bool, expected: int) -> None:
    """One part for each micro-batch under way, or the sum."""
    tied, shared = nn.Parameter(torch.ones(3, 5)), TiedGradients(in_order=in_order)
    gradient = torch.arange(15.0).view(3, 5)
    with Live() as live:
        for m in range(4):
            shared.loss_backward(m, {tied}, lambda: (tied * gradient).sum().backward())
    assert live.num_bytes == expected * tied.nbytes
    for m in range(4):
        shared.first_stage_backward(m, lambda: (tied * gradient).sum().backward())
    assert torch.equal(tied.grad, 8 * gradient)

"""A model that is one stage: its step runs where it is called, its gradients are added micro-batch by micro-batch.

batch 6 samples    micro-batches 3, 2, 1    shares 1/2, 1/3, 1/6, or none
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.runtime.capture.user_step import UserStep
from lightning_hanayo.runtime.stages.single import SingleStage

PARTS = torch.arange(12.0).view(6, 2).split([3, 2, 1])
SHARES = (1 / 2, 1 / 3, 1 / 6)


def stage_of(step: Callable[[int], Any], enter: Callable[[int], None] = lambda _: None) -> SingleStage:
    user = UserStep([], 0, "blocks", enter)
    user.begin(step)
    stage = SingleStage(user, WeightGradientQueue())
    stage.weights = SHARES
    return stage


def test_gradients_are_those_of_the_same_loop_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)

    def loss(microbatch: int) -> Tensor:
        return model(PARTS[microbatch]).square().mean()

    entered: list[int] = []
    stage = stage_of(loss, entered.append)
    for m in range(3):
        stage.forward(m, None)
        stage.backward(m, None)
    made = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for m, share in enumerate(SHARES):
        (loss(m) * share).backward()
    assert [torch.equal(ours, p.grad) for ours, p in zip(made, model.parameters(), strict=True)] == [True, True]
    assert entered == [0, 1, 2]
    assert [result.requires_grad for result in stage.results.values()] == [False] * 3


def test_the_step_runs_in_the_calling_thread() -> None:
    stage = stage_of(lambda _: threading.current_thread())
    stage.forward(0, None)
    assert stage.results[0] is threading.current_thread()


def test_a_microbatch_without_a_share_counts_for_nothing() -> None:
    weight = nn.Parameter(torch.ones(()))
    stage = stage_of(lambda _: weight * float("nan"))
    stage.weights = (0.0,)
    stage.forward(0, None)
    stage.backward(0, None)
    assert weight.grad is None


def test_a_step_without_a_loss_is_refused() -> None:
    stage = stage_of(lambda _: None)
    stage.forward(0, None)
    with pytest.raises(UnsupportedError, match="returned NoneType"):
        stage.backward(0, None)

"""A model that is one stage: its step runs in the calling thread, its gradients are added in micro-batch order.

batch 6 samples    micro-batches 3, 2, 1    shares 1/2, 1/3, 1/6, or none
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import SingleStage

PARTS = torch.arange(12.0).view(6, 2).split([3, 2, 1])
SHARES = (1 / 2, 1 / 3, 1 / 6)


def running(step: Callable[[int], Any], **options: Any) -> tuple[SingleStage, Batch]:
    """The stage, and a batch of which it runs `step`."""
    batch = Batch(step=step, **{"loss_weights": SHARES, **options})
    return SingleStage(user=UserStep([], 0, "blocks"), queue=WeightGradientQueue()), batch


def test_gradients_are_those_of_the_same_loop_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)

    def loss(microbatch: int) -> Tensor:
        return model(PARTS[microbatch]).square().mean()

    started: list[int | None] = []
    stage, batch = running(loss, on_user_code=started.append)
    for m in range(3):
        stage.forward(batch, m, None)
        stage.backward(batch, m, None)
    made = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    for m, share in enumerate(SHARES):
        (loss(m) * share).backward()
    assert [torch.equal(ours, p.grad) for ours, p in zip(made, model.parameters(), strict=True)] == [True, True]
    assert started == [0, 1, 2]
    assert [result.requires_grad for result in batch.results.values()] == [False] * 3


def test_the_step_runs_in_the_calling_thread() -> None:
    stage, batch = running(lambda _: threading.current_thread())
    stage.forward(batch, 0, None)
    assert batch.results[0] is threading.current_thread()


def test_a_microbatch_with_weight_0_does_not_count() -> None:
    weight = nn.Parameter(torch.ones(()))
    stage, batch = running(lambda _: weight * float("nan"), loss_weights=(0.0,))
    stage.forward(batch, 0, None)
    stage.backward(batch, 0, None)
    assert weight.grad is None


def test_a_step_without_a_loss_has_no_backward() -> None:
    stage, batch = running(lambda _: None)
    stage.forward(batch, 0, None)
    stage.backward(batch, 0, None)
    assert batch.results[0] is None  # the Trainer skips the batch

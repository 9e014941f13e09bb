"""The queue: what I puts in is computed in its W, and all memory is freed."""

import pytest
import torch
from torch import Tensor

from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from tests.runtime.queued_bytes import queued_bytes


def double(x: Tensor) -> Tensor:
    return 2 * x


def weight(value: float | None = None) -> Tensor:
    parameter = torch.zeros(2, requires_grad=True)
    parameter.grad = None if value is None else torch.full((2,), value)
    return parameter


def test_each_micro_batch_waits_for_its_own_drain() -> None:
    queue, parameter = WeightGradientQueue(), weight()
    for microbatch in (0, 1):
        with queue.collecting(microbatch):
            assert queue.is_open
            queue.put(parameter, double, torch.full((2,), 1.0 + microbatch))
        assert not queue.is_open
    assert parameter.grad is None and queued_bytes(queue) == 2 * 8
    queue.drain(1)
    assert parameter.grad.tolist() == [4, 4] and queued_bytes(queue) == 8
    queue.drain(0)
    assert parameter.grad.tolist() == [6, 6] and queued_bytes(queue) == 0


def test_it_adds_to_existing_gradients_in_place() -> None:
    queue, parameter = WeightGradientQueue(), weight(10.0)
    gradient = parameter.grad
    with queue.collecting(0):
        queue.put(parameter, double, torch.ones(2))
        queue.put(parameter, double, torch.ones(2))
    queue.drain(0)
    assert parameter.grad is gradient and gradient.tolist() == [14, 14]


def test_gradients_get_the_parameters_dtype() -> None:
    queue, parameter = WeightGradientQueue(), weight()
    for microbatch in (0, 1):
        with queue.collecting(microbatch):
            queue.put(parameter, double, torch.ones(2, dtype=torch.bfloat16))
        queue.drain(microbatch)
    assert parameter.grad.dtype is torch.float32 and parameter.grad.tolist() == [4, 4]


def test_storages_count_once() -> None:
    queue, operand = WeightGradientQueue(), torch.ones(4)
    with queue.collecting(0):
        queue.put(weight(), double, operand[:2])
        queue.put(weight(), double, operand[2:])
    assert queued_bytes(queue) == 16


def test_draining_an_empty_micro_batch() -> None:
    WeightGradientQueue().drain(7)  # a micro-batch without a share in the loss


def test_a_failure_closes_the_queue() -> None:
    queue, parameter = WeightGradientQueue(), weight()
    with pytest.raises(ZeroDivisionError), queue.collecting(0):
        queue.put(parameter, double, torch.ones(2))
        raise ZeroDivisionError
    assert not queue.is_open
    queue.clear()
    queue.drain(0)
    assert parameter.grad is None and queued_bytes(queue) == 0

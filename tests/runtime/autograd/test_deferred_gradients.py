"""Gradients made in the training step survive Lightning's order: step -> zero_grad -> backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.grad_sync import DeferredGradients


def training_step(parameters: list[nn.Parameter], value: float, *, accumulates: bool, scale: float = 1.0) -> Tensor:
    """A training step that makes gradients of `value`, as the pipeline does."""
    deferred = DeferredGradients(parameters, accumulates=accumulates)
    for parameter in parameters:
        made = torch.full_like(parameter, value * scale)
        parameter.grad = made if parameter.grad is None else parameter.grad.add_(made)
    deferred.stash()
    return deferred.surrogate_loss(torch.tensor(value), scale)


@pytest.fixture
def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))]


def test_gradients_survive_zero_grad(parameters: list[nn.Parameter]) -> None:
    for value in (3.0, 4.0):
        before = [p.grad for p in parameters]
        loss = training_step(parameters, value, accumulates=False)
        assert [p.grad for p in parameters] == before, "hooks before zero_grad see the last step's"
        for parameter in parameters:
            parameter.grad = None
        loss.backward()
        assert [p.grad.unique().item() for p in parameters] == [value, value]
        assert loss.item() == value and loss.requires_grad


def test_accumulated_batches(parameters: list[nn.Parameter]) -> None:
    for value, total in ((3.0, 1.5), (4.0, 3.5)):
        (training_step(parameters, value, accumulates=value != 3.0, scale=0.5) / 2).backward()
        assert [p.grad.unique().item() for p in parameters] == [total, total]


@pytest.mark.parametrize(("scale", "sent"), [(1.0, 1.0), (0.5, 0.5), (1.0, 4.0), (0.5, 2.0), (1 / 3, 1 / 3)])
def test_another_gradient_than_expected_scales(parameters: list[nn.Parameter], scale: float, sent: float) -> None:
    training_step(parameters, 3.0, accumulates=False, scale=scale).backward(torch.tensor(sent))
    assert [p.grad.unique().item() for p in parameters] == [pytest.approx(3.0 * sent)] * 2


def test_the_expected_gradient_has_the_losss_precision(parameters: list[nn.Parameter]) -> None:
    made = 0.1 + 1 / 7  # a factor of 0.998 would be seen
    deferred = DeferredGradients(parameters, accumulates=False)
    parameters[0].grad = torch.full((2,), made)
    deferred.stash()
    (deferred.surrogate_loss(torch.tensor(3.0, dtype=torch.bfloat16), 1 / 7) / 7).backward()
    assert torch.equal(parameters[0].grad, torch.full((2,), made))


def test_another_gradient_scales_only_the_batchs_own(parameters: list[nn.Parameter]) -> None:
    finished: list[float] = []
    for value, total in ((3.0, 1.5), (4.0, 3.5)):
        deferred = DeferredGradients(
            parameters,
            accumulates=value != 3.0,
            separate=True,
            finish=lambda: finished.append(parameters[0].grad[0].item()),
        )
        for parameter in parameters:
            assert parameter.grad is None
            parameter.grad = torch.full_like(parameter, value)
        deferred.stash()
        deferred.surrogate_loss(torch.tensor(value), 1.0).backward(torch.tensor(0.5))
        assert [p.grad.unique().item() for p in parameters] == [total, total]
    assert finished == [1.5, 3.5]


def test_an_unexpected_gradient_raises_an_error_while_batches_accumulate(parameters: list[nn.Parameter]) -> None:
    training_step(parameters, 3.0, accumulates=False).backward()
    with pytest.raises(UnsupportedError, match="accumulate_grad_batches"):
        training_step(parameters, 4.0, accumulates=True).backward(torch.tensor(0.5))


def test_a_loss_scale_that_a_loss_in_fp16_cannot_hold_overflows_while_batches_accumulate(
    parameters: list[nn.Parameter],
) -> None:
    training_step(parameters, 3.0, accumulates=False).backward()
    deferred = DeferredGradients(parameters, accumulates=True)
    for parameter in parameters:
        parameter.grad.fill_(torch.inf)  # the product of the micro-batch's loss and the scale is as large
    deferred.stash()
    scale = torch.tensor(2.0**17, dtype=torch.float64)
    loss = deferred.surrogate_loss(torch.tensor(3.0, dtype=torch.float16), scale / 4)
    (loss / 4 * scale).backward()
    assert [p.grad.unique().item() for p in parameters] == [torch.inf] * 2


def test_unused_parameters_get_no_gradient(parameters: list[nn.Parameter]) -> None:
    deferred = DeferredGradients([*parameters, unused := nn.Parameter(torch.zeros(1))], accumulates=False)
    parameters[0].grad = torch.ones(2)
    deferred.stash()
    assert parameters[0].grad is None
    deferred.surrogate_loss(torch.tensor(0.0), 1.0).backward(torch.tensor(2.0))
    assert parameters[0].grad.tolist() == [2.0, 2.0] and unused.grad is None


def test_gradients_are_put_back_with_parameters_unguarded(parameters: list[nn.Parameter]) -> None:
    seen: list[Tensor | None] = []

    @contextmanager
    def unguarded() -> Iterator[None]:
        seen.append(parameters[0].grad)
        yield
        seen.append(parameters[0].grad)

    deferred = DeferredGradients(parameters, accumulates=False, unguarded=unguarded)
    parameters[0].grad = made = torch.ones(2)
    deferred.stash()
    deferred.surrogate_loss(torch.tensor(0.0), 1.0).backward()
    assert seen[0] is None and seen[1] is made


@pytest.mark.parametrize("scales", [False, True])
def test_a_factor_on_a_device_multiplies_gradients_only_where_somebody_may_scale(
    parameters: list[nn.Parameter], monkeypatch: pytest.MonkeyPatch, *, scales: bool
) -> None:
    products: list[object] = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda gradients, factor: products.append(factor))
    deferred = DeferredGradients(parameters, accumulates=False, scales=scales)
    parameters[0].grad = made = torch.ones(2)
    deferred.stash()
    deferred.apply(torch.ones((), device="meta"))
    assert parameters[0].grad is made and len(products) == scales

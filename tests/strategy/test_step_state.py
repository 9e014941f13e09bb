"""Buffers and parameters that a training batch changes are noticed, however it changes them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.step_state import StepState


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("queue", torch.zeros(3))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("empty", None)


def state_of(model: nn.Module) -> StepState:
    return StepState(dict(model.named_modules()), dict(model.named_parameters()), set(), None, {}, None)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "in place": lambda model: model.queue.add_(1),
    "in place, through data": lambda model: model.queue.data.add_(1),
    "replaced": lambda model: setattr(model, "queue", torch.ones(3)),
    "an entry": lambda model: model.queue.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_buffer_is_warned_of_by_name_once(change: Callable[[Model], Any]) -> None:
    model = Model()
    state = state_of(model)
    with pytest.warns(UserWarning, match="^queue: buffers .* 4 micro-batches"), state.watched(4):
        change(model)
    with warnings.catch_warnings(), state.watched(4):
        warnings.simplefilter("error")
        change(model)


def test_one_microbatch_changes_a_buffer_as_one_process_does() -> None:
    model = Model()
    with warnings.catch_warnings(), state_of(model).watched(1):
        warnings.simplefilter("error")
        model.queue.add_(1)
        model.layer.weight.data.mul_(2)


@pytest.mark.parametrize("values", [lambda p: p.data, lambda p: p.detach()], ids=["data", "detached"])
def test_a_parameter_must_not_change_while_microbatches_are_under_way(values: Callable[[nn.Parameter], Any]) -> None:
    model = Model()
    with (
        pytest.raises(UnsupportedError, match="layer.weight is a parameter .* on_train_batch_end"),
        state_of(model).watched(4),
    ):
        values(model.layer.weight).mul_(0.5)


def test_a_hook_on_a_parameter_is_rejected_where_it_would_run_once_per_microbatch() -> None:
    model = Model()
    model.layer.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(UnsupportedError, match="layer.weight has the hook <lambda>"), state_of(model).watched(4):
        pass
    with state_of(model).watched(1):
        pass


def test_gradients_and_what_nobody_changes_are_fine() -> None:
    model = Model()
    with warnings.catch_warnings(), state_of(model).watched(4):
        warnings.simplefilter("error")
        model.layer(torch.ones(1, 2)).sum().backward()


def test_a_buffer_that_two_passes_of_a_step_change_is_rejected() -> None:
    model = Model()
    state = state_of(model)
    with pytest.raises(UnsupportedError, match="queue is a buffer that several passes"), state.watched(4):
        model.queue.add_(1)
        state.end_pass(0)
        state.end_pass(1)
        model.queue.add_(1)
        state.end_pass(0)
        model.queue.add_(1)
        state.end_pass(1)


class Unequal:
    """A cube whose ranks have other values of all buffers."""

    def largest(self, values: list[int]) -> list[int]:
        return [value + 1 for value in values]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("outer", "inner"), "^inner.running_mean .*Blocks in a cube"),
        (("outer",), "^outer.running_mean .*cube_outside='replicate'"),
    ],
)
def test_a_buffer_of_a_block_is_named_before_one_that_an_option_allows(changed: tuple[str, ...], message: str) -> None:
    norms = {name: nn.BatchNorm1d(2, affine=False) for name in changed}
    outside = {"outer": norms["outer"]}
    state = StepState(norms, {}, set(norms.values()), Unequal(), outside, None)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=message), state.watched(1):
        for norm in norms.values():
            norm(torch.ones(2, 2))

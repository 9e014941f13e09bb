"""Hooks can't use `optimizer.state` where each rank has the states of some parameters, or parts of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.optimizer_steps import RefusedStates

REFUSED: list[Callable[[Any, nn.Parameter], object]] = [
    lambda state, parameter: state[parameter],
    lambda state, parameter: state.pop(parameter),
    lambda state, parameter: parameter in state,
    lambda state, _: list(state.values()),
    lambda state, _: state.clear(),
    lambda state, _: len(state),
]


def adam() -> Any:
    layer = nn.Linear(2, 3)
    layer(torch.ones(1, 2)).sum().backward()
    made = Adam(layer.parameters())
    made.step()
    return made


@pytest.mark.parametrize("use", REFUSED)
def test_user_code_gets_an_error(use: Callable[[Any, nn.Parameter], object]) -> None:
    optimizer = adam()
    own, states = optimizer.state, RefusedStates(optimizer)
    states.enter()
    with pytest.raises(UnsupportedError, match=r"states of Adam.*optimizer.state can't be used here.*save_checkpoint"):
        use(optimizer.state, optimizer.param_groups[0]["params"][0])
    states.leave()
    assert optimizer.state is own and len(own) == 2


def test_states_that_user_code_has_put_in_their_place_are_refused() -> None:
    optimizer = adam()
    states = RefusedStates(optimizer)
    states.enter()
    optimizer.state = {}
    with pytest.raises(UnsupportedError, match=r"optimizer.state can't be used here"):
        states.leave()
    assert len(optimizer.state) == 2

"""In hooks `optimizer.state` has the states of other ranks' parameters, too: without values, and never in silence."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.guards import MissingValues, ParameterGuard
from lightning_hanayo.partition.ownership import replace_with_placeholders
from lightning_hanayo.strategy.optimizer.guarded_states import GuardedStates


class Model(nn.Module):
    """`own` is on this rank, 0, `other` on rank 2."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(2, 3)
        self.other = nn.Linear(3, 4)
        replace_with_placeholders(self, set(self.own.parameters()))


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def optimizer(model: Model) -> Any:
    made = Adam(model.parameters())
    for parameter in model.own.parameters():
        parameter.grad = torch.ones_like(parameter)
    made.step()
    return made


@pytest.fixture
def guard(model: Model, optimizer: Any) -> Iterator[ParameterGuard]:
    names = dict(model.named_parameters())
    made = ParameterGuard(torch.device("cpu"))
    made.watch(names, {name: 2 if "other" in name else 0 for name in names}, {}, set())
    states = GuardedStates(optimizer, made, {parameter: name for name, parameter in names.items()}, None)
    made.before_user_code, made.after_user_code = states.enter, states.leave
    yield made
    assert type(optimizer.state).__name__ == "defaultdict"


def test_changes_of_each_state_are_made_where_it_is(model: Model, optimizer: Any, guard: ParameterGuard) -> None:
    with guard.during("hook"):
        for parameter in model.parameters():
            optimizer.state[parameter]["exp_avg"].fill_(7.0)
            optimizer.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)
    assert optimizer.state[model.own.weight]["exp_avg"].unique().tolist() == [7.0]
    assert optimizer.state[model.own.weight]["exp_avg_sq"].unique().tolist() == [0.0]
    assert list(optimizer.state) == list(model.own.parameters())


def test_all_parameters_are_there(model: Model, optimizer: Any, guard: ParameterGuard) -> None:
    with guard.during("hook"):
        assert len(optimizer.state) == 4
        missing = [state["exp_avg"] for state in optimizer.state.values() if isinstance(state["step"], MissingValues)]
        assert [tuple(one.shape) for one in missing] == [(4, 3), (4,)]
        assert "exp_avg" in optimizer.state[model.other.bias]


def test_values_are_refused_by_name(optimizer: Any, guard: ParameterGuard) -> None:
    with guard.during("hook"), pytest.raises(UnsupportedError, match=r"exp_avg of other\.weight is on pipeline rank 2"):
        float(sum(state["exp_avg"].norm() for state in optimizer.state.values()))


def test_a_state_of_this_rank_is_not_made_of_another_one(model: Model, optimizer: Any, guard: ParameterGuard) -> None:
    with pytest.raises(UnsupportedError, match=r"other\.bias"), guard.during("hook"):
        optimizer.state[model.own.bias]["exp_avg"] = optimizer.state[model.other.bias]["exp_avg"].clone()


def test_code_of_rank_zero_alone_is_refused(model: Model, optimizer: Any, guard: ParameterGuard) -> None:
    with guard.during("step"), pytest.raises(UnsupportedError, match="runs on pipeline rank 0 alone"):
        optimizer.state[model.other.weight]["exp_avg"]


def test_states_are_removed_and_replaced(model: Model, optimizer: Any, guard: ParameterGuard) -> None:
    with guard.during("hook"):
        optimizer.state.pop(model.own.bias)
        optimizer.state.pop(model.other.bias)
        assert list(optimizer.state) == [model.own.weight, model.other.weight]
        optimizer.state = {parameter: dict(state) for parameter, state in optimizer.state.items()}
    assert list(optimizer.state) == [model.own.weight]
    with guard.during("hook"):
        optimizer.state.clear()
        assert not optimizer.state
    assert not optimizer.state


def test_parameters_without_gradients_have_none(model: Model, optimizer: Any, guard: ParameterGuard) -> None:
    model.other.requires_grad_(False)
    with guard.during("hook"):
        assert [state["step"].item() for state in optimizer.state.values()] == [1.0, 1.0]

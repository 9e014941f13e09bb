"""Parameters are guarded while user code runs, and are plain ones before, after, and in what user code calls."""

import pytest
import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partial_values import PartialParameter
from lightning_hanayo.partition.guards import GuardedPlaceholder, ParameterGuard
from lightning_hanayo.partition.ownership import Placeholder, replace_with_placeholders


class Special(nn.Parameter):
    """A user's class."""


@pytest.fixture
def model() -> nn.ModuleDict:
    """The head is whole in steps, the block is a part always, and another rank's block is a placeholder."""
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("head", "block", "other")})
    model.block.weight = Special(torch.ones(2, 2))
    replace_with_placeholders(model, {model.head.weight, model.block.weight})
    return model


@pytest.fixture
def guard(model: nn.ModuleDict) -> ParameterGuard:
    guard = ParameterGuard(torch.device("cpu"))
    owners = {"head.weight": 0, "block.weight": 0, "other.weight": 1}
    whole = {model.head.weight: (4, 2), model.block.weight: (2, 8)}
    guard.watch(dict(model.named_parameters()), owners, whole, {model.block.weight: PartialParameter})
    return guard


def classes(model: nn.Module) -> list[type]:
    return [type(parameter) for parameter in model.parameters()]


PLAIN = [nn.Parameter, Special, Placeholder]


def test_which_parameters_are_guarded_when(model: nn.ModuleDict, guard: ParameterGuard) -> None:
    assert classes(model) == PLAIN
    with guard.step():
        assert classes(model)[:2] == [nn.Parameter, PartialParameter]
        assert isinstance(model.other.weight, GuardedPlaceholder)
    with guard.during("hook"):
        assert classes(model)[:2] == [PartialParameter, PartialParameter]
        with guard.off(), guard.off():
            assert classes(model) == PLAIN
        assert classes(model)[0] is PartialParameter
    assert classes(model) == PLAIN


def test_an_error_in_user_code_leaves_them_plain(model: nn.ModuleDict, guard: ParameterGuard) -> None:
    with pytest.raises(UnsupportedError, match=r"block.weight, .* the whole \(2, 8\)"), guard.step():
        model.block.weight.sum()
    assert classes(model) == PLAIN


def test_the_name_of_the_hook_is_that_of_the_innermost_one(guard: ParameterGuard) -> None:
    with guard.during("hook", "outer"), guard.off(), guard.during("hook", "inner"):
        assert guard.hook_name == "inner"
    assert (guard.scope, guard.hook_name) == ("off", "")


def test_after_the_run_it_guards_nothing(model: nn.ModuleDict, guard: ParameterGuard) -> None:
    assert set(guard.end()) == set(model.parameters())
    with guard.during("hook"):
        assert classes(model) == PLAIN


def test_user_code_that_is_called_back_is_guarded_as_where_it_was_handed_over(
    model: nn.ModuleDict, guard: ParameterGuard
) -> None:
    with guard.during("hook", "optimizer_step"):
        called_back = guard.in_this_scope(lambda: (guard.scope, guard.hook_name, classes(model)[0]))
        with guard.off():
            assert called_back() == ("hook", "optimizer_step", PartialParameter)
            assert classes(model) == PLAIN
    assert guard.in_this_scope(lambda: guard.scope)() == "off"

"""Between runs, of a part and of a placeholder sizes can be read; any other use is an error that names the parameter.

                 whole     this rank
block.weight     [4, 2]    [2, 2]
other.weight     [2, 2]    nothing: it is on pipeline rank 1
"""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition import guards
from lightning_hanayo.partition.guards import ParameterGuard
from lightning_hanayo.partition.ownership import Placeholder, replace_with_placeholders

NAMES = ["block", "other"]


@pytest.fixture
def model() -> nn.ModuleDict:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in NAMES})
    replace_with_placeholders(model, {model.block.weight})
    guard = ParameterGuard(torch.device("cpu"))
    owners = {"block.weight": 0, "other.weight": 1}
    guard.watch(dict(model.named_parameters()), owners, {model.block.weight: (4, 2)}, set())
    guards.guard(guard.end())
    return model


USES: dict[str, Callable[[nn.Module], Any]] = {
    "state_dict": lambda layer: layer.state_dict(),
    "forward": lambda layer: layer(torch.ones(1, 2)),
    "to": lambda layer: layer.to(torch.float64),
    "norm": lambda layer: layer.weight.norm(),
    "in place": lambda layer: nn.init.zeros_(layer.weight),
    "data": lambda layer: layer.weight.data,
    "torch.save": lambda layer: torch.save(layer, io.BytesIO()),
    "state_dict of a copy": lambda layer: copy.deepcopy(layer).state_dict(),
    "state_dict of a pickled copy": lambda layer: pickle.loads(pickle.dumps(layer)).state_dict(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", NAMES)
def test_any_use_is_refused_by_name(model: nn.ModuleDict, name: str, use: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}.weight.* and the run has ended.*gather_model"):
        USES[use](model[name])


def test_sizes_are_those_of_the_whole(model: nn.ModuleDict) -> None:
    assert [tuple(one.shape) for one in model.parameters()] == [(4, 2), (2, 2)]
    assert sum(one.numel() for one in model.parameters() if one.requires_grad) == 12
    assert {one.device for one in model.parameters()} == {torch.device("cpu")}
    assert "part" in repr(model.block.weight) and "rank 1" in repr(model.other.weight)


@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_released_parameters_are_plain(model: nn.ModuleDict, copied: Callable[[Any], Any]) -> None:
    twin = copied(model)
    with guards.released(twin):
        assert [type(one) for one in twin.parameters()] == [nn.Parameter, Placeholder]
        with guards.released(model):
            assert torch.equal(twin.block.weight, model.block.weight) and twin.other.weight.is_meta
    with pytest.raises(UnsupportedError):
        twin.state_dict()


def test_recurrent_layers_forget_the_values_of_other_ranks() -> None:
    model = nn.ModuleDict({"other": nn.GRU(2, 2)})
    replace_with_placeholders(model, set())
    assert all(isinstance(weight, Placeholder) for weight in model.other._flat_weights)

"""Optimizer states belong to names: groups may come in another order, and an error names what doesn't belong."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from lightning_hanayo.dist_checkpointing.load_state import CLASS_NAME, OptimizerState, Source
from lightning_hanayo.dist_checkpointing.state import WITHOUT_STATE
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.partition.ownership import replace_with_placeholders

SOURCE = Source("last.ckpt")
Groups = Sequence[Sequence[str]]
BY_KIND = [["a.weight", "b.weight"], ["a.bias", "b.bias"]]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 2)})


def adamw(module: nn.Module, groups: Groups = BY_KIND) -> Optimizer:
    parameters = dict(module.named_parameters())
    decays = {tuple(BY_KIND[0]): 0.1}
    return AdamW(
        [{"params": [parameters[n] for n in group], "weight_decay": decays.get(tuple(group), 0.0)} for group in groups]
    )


def step(module: nn.Module, optimizer: Optimizer, without: Sequence[str] = ()) -> None:
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if not parameter.is_meta:
            parameter.grad = None if name in without else torch.full_like(parameter, 1.0 + number)
    optimizer.step()


def trained(make: Callable[..., Optimizer] = adamw, **options: Any) -> dict[str, Any]:
    """What a plain file has of an optimizer after a step."""
    module = model()
    optimizer = make(module)
    step(module, optimizer, **options)
    return copy.deepcopy(optimizer.state_dict())


def by_name(state: dict[str, Any], groups: Groups = BY_KIND) -> dict[str, Any]:
    """The same as a folder has it."""
    names = [name for group in groups for name in group]
    return {
        "state": {names[index]: values for index, values in state["state"].items()},
        "param_groups": [
            {**group, "params": list(own)} for group, own in zip(state["param_groups"], groups, strict=True)
        ],
    }


def load(state: dict[str, Any], module: nn.Module, optimizer: Optimizer, **options: Any) -> OptimizerState:
    checked = OptimizerState(optimizer, state, {p: name for name, p in module.named_parameters()}, SOURCE, **options)
    checked.load(None)
    return checked


def refusal(state: dict[str, Any], groups: Groups = BY_KIND, module: nn.Module | None = None, **options: Any) -> str:
    module = module or model()
    optimizer = adamw(module, groups)
    with pytest.raises(CheckpointError) as raised:
        load(state, module, optimizer, **options)
    assert not optimizer.state, "nothing was loaded"
    return str(raised.value)


MAKERS = [
    adamw,
    lambda module: SGD(module.parameters(), lr=0.1, momentum=0.9),
    lambda module: SGD(module.parameters(), lr=0.1),
    lambda module: Adagrad(module.parameters()),
]


@pytest.mark.parametrize("make", MAKERS, ids=["adamw", "momentum", "sgd", "adagrad"])
def test_each_rank_loads_its_own_states(make: Callable[..., Optimizer]) -> None:
    state, module = trained(make), model()
    replace_with_placeholders(module, set(module["a"].parameters()))  # type: ignore[index]
    optimizer = make(module)
    load(state, module, optimizer, shapes={})
    found = {index: values for index, values in optimizer.state_dict()["state"].items() if not is_meta(values)}
    own = {index for index, p in enumerate(p for g in optimizer.param_groups for p in g["params"]) if not p.is_meta}
    expected = {index: values for index, values in state["state"].items() if index in own}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def is_meta(values: dict[str, Any]) -> bool:
    return any(getattr(value, "is_meta", False) for value in values.values())


def test_groups_may_come_in_another_order() -> None:
    module = model()
    optimizer = adamw(module, [["b.bias", "a.bias"], ["b.weight", "a.weight"]])
    load(by_name(trained()), module, optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.1]
    expected = trained()["state"]
    parameters = dict(module.named_parameters())
    for index, name in enumerate(name for group in BY_KIND for name in group):
        torch.testing.assert_close(optimizer.state[parameters[name]], expected[index], rtol=0, atol=0)


def test_memory_is_the_optimizers_own() -> None:
    state, module = trained(), model()
    optimizer = adamw(module)
    load(state, module, optimizer)
    step(module, optimizer)
    torch.testing.assert_close(state, trained(), rtol=0, atol=0)


def test_other_groups_are_refused() -> None:
    assert refusal(by_name(trained()), [["a.weight", "a.bias"], ["b.weight", "b.bias"]]) == (
        "last.ckpt has a.weight and a.bias in different param groups of its optimizer, unlike this AdamW. "
        "Build the same groups; their order may be another."
    )
    assert "has a.weight and b.weight in one param group of its optimizer, unlike this AdamW" in (
        refusal(by_name(trained()), [["a.weight"], ["b.weight"], ["a.bias", "b.bias"]])
    )
    assert "groups of [2, 2] parameters, this AdamW has groups of [4]" in refusal(trained(), [sum(BY_KIND, [])])


def test_a_missing_state_is_refused_or_starts_anew() -> None:
    for state, key in ((trained(), 1), (by_name(trained()), "b.weight")):
        del state["state"][key]
        assert "last.ckpt has no optimizer state of b.weight" in refusal(state)
        module = model()
        optimizer = adamw(module)
        checked = load(state, module, optimizer, accept=("optimizer_state",))
        assert "has no optimizer state of b.weight: accepted (start with new states)" in checked.warnings[0]
        assert len(optimizer.state) == 3
        step(module, optimizer)


def test_parameters_that_never_had_a_state_need_none() -> None:
    module, state = model(), trained(without=["b.bias"])
    load(by_name(state) | {WITHOUT_STATE: ["b.bias"]}, module, adamw(module))
    load(state | {WITHOUT_STATE: [3]}, module, adamw(module))
    assert "no optimizer state of b.bias" in refusal(state)
    module["b"].bias.requires_grad_(False)  # type: ignore[index,union-attr]
    load(state, module, adamw(module))
    fresh = model()
    load(adamw(fresh).state_dict(), fresh, adamw(fresh))  # saved before the first step


def test_states_of_other_parameters_are_refused_or_left_out() -> None:
    state = by_name(trained())
    state["param_groups"][0]["params"].append("c.weight")
    state["state"]["c.weight"] = state["state"]["a.weight"]
    assert "optimizer states of other parameters than this optimizer trains: c.weight" in refusal(state)
    module = model()
    load(state, module, adamw(module), accept=("optimizer_state",))


def test_another_optimizer_is_refused() -> None:
    sgd = trained(lambda module: SGD([{"params": g} for g in grouped(module)], lr=0.1, momentum=0.9))
    assert "was saved of another optimizer: its groups lack betas, eps, which this AdamW has" in refusal(sgd)

    adam = by_name(trained()) | {CLASS_NAME: "torch.optim.adam.Adam"}  # its groups have the same options
    assert "has the states of Adam, not of this AdamW" in refusal(adam)


def grouped(module: nn.Module) -> list[list[nn.Parameter]]:
    parameters = dict(module.named_parameters())
    return [[parameters[name] for name in group] for group in BY_KIND]


def test_parameters_in_another_order_are_refused_where_a_file_has_numbers() -> None:
    text = refusal(trained(), [["b.weight", "a.weight"], BY_KIND[1]], shapes={})
    assert "has exp_avg [3, 3] for b.weight, which is [2, 3]" in text

"""The state of modules: what is found, what counts as a change, and what it costs where nothing changes."""

import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric

from lightning_hanayo.pipeline_parallel.capture.state import (
    CONTENT,
    MUTATED,
    REMOVED,
    ModuleState,
    Scanner,
    kept_parameters,
)


class Box:
    def __init__(self) -> None:
        self.level = 0.0


@dataclass(slots=True)
class Slotted:
    level: float = 0.0
    tensor: Any = None


class Block(nn.Module):
    def __init__(self, box: Box) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.box = box
        self.losses: list[Any] = []


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.box = Box()
        self.layers = nn.ModuleList(Block(self.box) for _ in range(3))
        self.head = nn.Linear(2, 2)
        self.metric = MeanMetric()
        self.queue = deque([1.0])
        self.data = list(range(1000))


@pytest.fixture
def model() -> Model:
    return Model()


def state_of(model: Model) -> ModuleState:
    return ModuleState(model, list(model.layers), "layers")


def scanner_of(model: Model) -> Scanner:
    state = state_of(model)
    return Scanner(list(state.holders.values()), state.clock)


def test_holders_are_modules_objects_lists_and_buffers(model: Model) -> None:
    holders = state_of(model).holders
    assert {"Model", "Model.queue", "layers[0]", "layers[0].box", "layers[0].norm._buffers"} <= holders.keys()
    assert "Model.data" not in holders, "long lists are data"
    assert not any(name.startswith("metric") for name in holders), "metrics are merged as such"


def test_an_object_that_blocks_share_is_one_holder_that_all_reach(model: Model) -> None:
    holders = state_of(model).holders
    assert holders["layers[0].box"].blocks == {0, 1, 2}
    assert "layers[1].box" not in holders and "Model.box" not in holders
    assert holders["layers[1]"].blocks == {1}


def test_the_holders_of_some_blocks(model: Model) -> None:
    names = {holder.name for holder in state_of(model).of_blocks([1])}
    assert names == {
        "layers[1]", "layers[1].linear", "layers[1].norm", "layers[1].norm._buffers", "layers[1].losses",
        "layers[1]._modules",
        "layers[0].box",
    }  # fmt: skip


def test_nothing_has_changed_at_first(model: Model) -> None:
    assert scanner_of(model).scan() == {}


def test_each_change_is_found_once(model: Model) -> None:
    scanner = scanner_of(model)
    loss = torch.ones(())
    model.layers[1].aux_loss = loss
    model.box.level = 0.5
    model.layers[2].losses.append(loss)
    model.queue.append(2.0)
    del model.layers[0].losses
    assert scanner.scan() == {
        ("layers[1]", "aux_loss"): loss,
        ("layers[0].box", "level"): 0.5,
        ("layers[2].losses", CONTENT): [loss],
        ("Model.queue", CONTENT): deque([1.0, 2.0]),
        ("layers[0]", "losses"): REMOVED,
    }
    assert scanner.scan() == {}


def test_tensors_are_compared_by_identity_and_plain_values_by_value(model: Model) -> None:
    model.value, model.number = torch.ones(()), 1234.5
    scanner = scanner_of(model)
    model.number = float("1234.5")
    assert scanner.scan() == {}
    model.value = torch.ones(())
    assert list(scanner.scan()) == [("Model", "value")]


def test_a_tensor_changed_in_place_is_a_change(model: Model) -> None:
    model.value = torch.ones(())
    scanner = scanner_of(model)
    model.value.add_(1)
    assert list(scanner.scan()) == [("Model", "value")]


def test_parameters_are_no_state_wherever_they_are_kept(model: Model) -> None:
    block = model.layers[0]
    weight = block.linear.weight
    block.losses += [weight, torch.zeros(())]
    vars(block)["hidden"] = weight
    scanner = scanner_of(model)
    with torch.no_grad():
        weight.mul_(2.0)
    assert scanner.scan() == {}
    block.losses[1].add_(1.0)
    assert scanner.scan().keys() == {("layers[0].losses", CONTENT)}


def test_parameters_that_blocks_keep_without_registering_them(model: Model) -> None:
    first, second, third = model.layers
    first.own = [first.linear.weight, {"norm": (first.norm.bias,)}]
    second.function = partial(nn.functional.linear, weight=model.head.weight)
    second.all = [model.layers]  # a module around it
    third.hidden = [model.head, third.linear]
    found = {(index, path): parameter for parameter, index, path in kept_parameters(list(model.layers), "layers")}
    assert found.keys() == {
        (1, "layers[1].function.keywords.weight"), (2, "layers[2].hidden.0.weight"), (2, "layers[2].hidden.0.bias"),
    }  # fmt: skip
    assert found[1, "layers[1].function.keywords.weight"] is model.head.weight


def test_a_buffer_changed_in_place_is_told_apart_from_one_assigned(model: Model) -> None:
    scanner, norm = scanner_of(model), model.layers[0].norm
    norm.running_mean.add_(1)
    assert scanner.scan() == {("layers[0].norm._buffers", "running_mean"): MUTATED}
    norm.running_mean = new = torch.zeros(2)
    assert scanner.scan() == {("layers[0].norm._buffers", "running_mean"): new}


def test_an_attribute_on_a_linear_layer_is_seen(model: Model) -> None:
    scanner = scanner_of(model)
    model.head.last = 1
    assert scanner.scan() == {("head", "last"): 1}
    model.head.last = 2
    assert scanner.scan() == {("head", "last"): 2}


def test_values_that_are_set_are_no_changes_and_come_back_as_they_were(model: Model) -> None:
    state = state_of(model)
    scanner = Scanner(list(state.holders.values()), state.clock)
    model.layers[0].losses.append(1)
    scanner.scan()
    values = {("layers[0]", "aux"): 1, ("layers[0].losses", CONTENT): [2, 3], ("unknown", "x"): 1}
    before = state.get(values)
    state.set(values)
    assert model.layers[0].aux == 1 and model.layers[0].losses == [2, 3]
    assert scanner.scan() == {}
    state.set(before)
    assert not hasattr(model.layers[0], "aux") and model.layers[0].losses == [1]


def test_undo_restores_the_last_scan(model: Model) -> None:
    scanner = scanner_of(model)
    model.layers[0].losses.append(1)
    model.box.level = 2.0
    scanner.undo()
    assert model.layers[0].losses == [] and model.box.level == 0.0


def test_undo_leaves_dictionaries_that_refuse_changes_alone(model: Model) -> None:
    class Frozen(dict[str, Any]):
        """As the configurations of diffusers."""

        def update(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("frozen")

    model.layers[0].config = Frozen(width=4)
    scanner = scanner_of(model)
    model.box.level = 2.0
    scanner.undo()
    assert model.box.level == 0.0 and model.layers[0].config == {"width": 4}


def test_new_objects_are_followed(model: Model) -> None:
    state = state_of(model)
    scanner = Scanner(list(state.holders.values()), state.clock)
    model.layers[1].box = box = Box()
    assert state.follow(scanner.scan())
    assert state.holders["layers[1].box"].container is vars(box)
    assert not state.follow({("layers[1]", "aux"): 1.0})


def test_objects_with_slots_are_holders_too(model: Model) -> None:
    model.layers[0].slotted = slotted = Slotted()
    state = state_of(model)
    scanner = Scanner(list(state.holders.values()), state.clock)
    slotted.level = 0.5
    assert scanner.scan() == {("layers[0].slotted", "level"): 0.5}
    state.set({("layers[0].slotted", "tensor"): 1})
    assert slotted.tensor == 1 and scanner.scan() == {}
    slotted.level = 2.0
    scanner.undo()
    assert slotted.level == 0.5


def test_a_new_list_leaves_attributes_whose_names_begin_alike(model: Model) -> None:
    block = model.layers[1]
    block.aux, block.aux_state = [], {"level": 1.0}
    state = state_of(model)
    block.aux = [2.0]
    state.follow({("layers[1]", "aux"): block.aux})
    block.aux_state["level"] = 0.5
    assert ("layers[1].aux_state", CONTENT) in Scanner(list(state.holders.values()), state.clock).scan()


def reaching(box: Box) -> dict[str, Any]:
    return {
        "tuple": (1, box),
        "closure": lambda: box.level,
        "method": box.__init__,  # type: ignore[misc]
        "partial": partial(getattr, box, "level"),
        "weak reference": weakref.ref(box),
    }


@pytest.mark.parametrize("how", reaching(Box()))
def test_a_block_reaches_an_object_through(how: str, model: Model) -> None:
    box = Box()
    model.layers[2].way = reaching(box)[how]
    state = state_of(model)
    scanner = Scanner(state.of_blocks({2}), state.clock)
    box.level = 0.5
    assert list(scanner.scan().values()) == [0.5]


def test_functions_that_call_themselves_are_searched_once(model: Model) -> None:
    def countdown(number: int) -> int:
        return countdown(number - 1) if number else 0

    model.layers[0].way = countdown
    state_of(model)

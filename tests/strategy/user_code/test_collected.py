"""What steps change outside the blocks is found, and attributed to their micro-batches."""

from typing import Any, ClassVar

import pytest
import torch
from lightning import LightningModule
from torch import Tensor

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.user_code.collected import MUTATED, Collections, Left
from tests.harness import models
from tests.harness.training import Layout, make_loader, make_strategy, make_trainer


class Store:
    def __init__(self) -> None:
        self.items: list[int] = []


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = [9]
        self.by_name: dict[str, list[int]] = {}
        self.store = Store()
        self.total = torch.zeros(())
        self.last = 0


def collections(module: Model) -> Collections:
    return Collections(module, [module])


def test_each_micro_batch_has_its_own() -> None:
    module = Model()
    found = collections(module)
    found.begin_batch()
    found.enter(0)
    module.outputs.append([1])
    module.by_name.setdefault("a", []).append(2)
    module.last = 5
    found.enter(1)
    module.outputs.append([3])
    module.store.items.append(4)
    module.total += 1
    assert found.end_batch(2) == [
        Left({("self", "outputs"): [[1]], ("self", "by_name", "a"): [2]}, {("self", "last"): 5}),
        Left({("self", "outputs"): [[3]], ("self.store", "items"): [4]}, {("self", "total"): MUTATED}),
    ]
    found.store({("self", "outputs"): [13], ("self", "by_name", "a"): [7]}, {("self", "last"): 6})
    assert (module.outputs, module.by_name, module.last) == ([9, 13], {"a": [7]}, 6)


def test_a_list_that_steps_clear_is_theirs() -> None:
    module = Model()
    found = collections(module)
    found.begin_batch()
    for microbatch in range(2):
        found.enter(microbatch)
        module.outputs.clear()
        module.outputs.append(microbatch)
    assert found.end_batch(2) == [Left(), Left()]


def test_lists_that_steps_set_are_longer_ones_or_values() -> None:
    module = Model()
    found = collections(module)
    found.begin_batch()
    for microbatch in range(2):
        found.enter(microbatch)
        module.outputs = [*module.outputs, microbatch]
        module.by_name["a"] = [microbatch]
        found.enter(microbatch)
        module.by_name["a"].append(5)
    lefts = found.end_batch(2)
    assert [left.appended.get(("self", "outputs")) for left in lefts] == [[0], [1]]
    assert [left.assigned for left in lefts][1] == {("self", "by_name", "a"): [1, 5]}


def test_other_ranks_get_what_is_new() -> None:
    module, other = Model(), Model()
    first, second = collections(module), collections(other)
    for item in (1, 2):
        first.begin_batch()
        first.enter(0)
        module.outputs.append(item)
        first.end_batch(1)
        changed = first.take_changed()
        second.give(changed)
    assert changed == {("self", "outputs"): (2, [2])}
    assert other.outputs == [9, 1, 2]
    other.outputs.clear()
    with pytest.raises(UnsupportedError, match="self.outputs has 0 items on this rank, but .* had 2"):
        second.give(changed)


class FillsItsClass(models.MLP):
    losses: ClassVar[list[Tensor]] = []
    by_loader: ClassVar[dict[int, list[float]]] = {0: []}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.losses.append(loss)
        self.by_loader[0].append(float(loss))


@pytest.mark.parametrize("step", ["auto", "microbatch"])
def test_lists_of_the_class_get_an_item_for_each_batch(step: str) -> None:
    FillsItsClass.losses.clear()
    FillsItsClass.by_loader[0].clear()
    trainer = make_trainer(Layout(), strategy=make_strategy(Layout(num_microbatches=2, step=step)))
    module = models.build(FillsItsClass)
    batches = models.vectors((8, 8, 8))
    trainer.validate(module, make_loader(batches), verbose=False)
    expected = [module.loss(batch).item() for batch in batches]
    assert [float(loss) for loss in FillsItsClass.losses] == pytest.approx(expected)
    assert FillsItsClass.by_loader[0] == pytest.approx(expected)

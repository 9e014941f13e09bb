"""A check takes batches, ranks and callbacks from what the user has for a training."""

from collections import namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import Callback, LightningDataModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from lightning_hanayo.checking.case import cast, select_callbacks, take_batches, topology_of
from lightning_hanayo.checking.trainings import make_loader as make_check_loader
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy import HanayoStrategy
from lightning_hanayo.topology import Topology
from tests.harness import models
from tests.harness.training import make_loader

Pair = namedtuple("Pair", "x y")


@dataclass
class Sample:
    x: Tensor
    name: str


@dataclass
class Counted:
    x: Tensor
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = len(self.x)


HALF, WHOLE = torch.ones(2), torch.ones(2, dtype=torch.long)


@pytest.mark.parametrize(
    "batch",
    [
        {"x": HALF, "y": WHOLE},
        [HALF, WHOLE],
        (HALF, "a"),
        Pair(HALF, WHOLE),
        Sample(HALF, "a"),
        Counted(HALF),
        SimpleNamespace(x=HALF),
        [SimpleNamespace(x=HALF)],
        HALF,
        {"a": [HALF]},
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_floating_point_tensors_of_any_batch_are_cast(batch: Any) -> None:
    found = cast(batch, torch.float64)
    assert type(found) is type(batch)
    assert "float64" in repr(found)
    assert repr(found).replace(", dtype=torch.float64", "") == repr(batch)


class Data(LightningDataModule):
    def setup(self, stage: str) -> None:
        assert stage == "fit"
        self.batches = torch.arange(6.0).reshape(3, 2)

    def train_dataloader(self) -> Any:
        return DataLoader(self.batches, batch_size=None)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch + 1


def test_batches_come_from_a_datamodule_and_its_hooks() -> None:
    first, second = take_batches(models.MLP(), Data(), 2, torch.float64).batches
    assert (first.tolist(), second.tolist(), first.dtype) == ([1.0, 2.0], [3.0, 4.0], torch.float64)


def test_batches_come_from_a_loader_or_the_module() -> None:
    module: Any = models.MLP()
    module.train_dataloader = lambda: iter([HALF, HALF])
    assert len(take_batches(module, None, 2, torch.float32).batches) == 2
    assert len(take_batches(module, [WHOLE] * 3, 2, torch.float32).batches) == 2


def test_several_loaders_are_combined() -> None:
    module: Any = models.MLP()
    module.train_dataloader = lambda: {"a": make_loader([1, 2]), "b": make_loader([3, 4])}
    taken = take_batches(module, None, 2, torch.float32)
    assert taken[:2] == (({"a": 1, "b": 3}, {"a": 2, "b": 4}), {"a": None, "b": None})


def test_batches_say_whether_torch_has_collated_them() -> None:
    """Then lists are columns, in the check as in the training."""
    loader = DataLoader([(HALF, HALF)] * 4, batch_size=2)
    taken = take_batches(models.MLP(), loader, 2, torch.float32)
    case: Any = SimpleNamespace(batches_of=lambda _: list(taken.batches), **taken._asdict())
    again = make_check_loader(case, 0)
    assert taken.are_collated and again.collate_fn is default_collate
    assert [type(batch) for batch in again] == [list, list]
    assert not take_batches(models.MLP(), [HALF] * 2, 2, torch.float32).are_collated


def test_too_few_batches_are_a_mistake() -> None:
    with pytest.raises(HanayoError, match="the check needs 4 batches .* the training loader has 3"):
        take_batches(models.MLP(), [HALF] * 3, 4, torch.float64)


def test_the_ranks_are_the_devices_or_the_strategys_sizes() -> None:
    sizes: dict[str, Any] = {"pipeline_parallel_size": 2, "cube": (1, 2, 1)}
    assert topology_of(HanayoStrategy(**sizes).options, None) == Topology(1, 2, (1, 2, 1))
    assert topology_of(HanayoStrategy(**sizes, data_parallel_size="auto").options, 8) == Topology(2, 2, (1, 2, 1))
    assert topology_of(HanayoStrategy(cube=2).options, None) == Topology(1, 1, (2, 2, 2)), "what is given says enough"
    assert topology_of(HanayoStrategy(data_parallel_size=2).options, None) == Topology(2, 1, (1, 1, 1))


def test_ranks_that_no_one_gives_are_a_mistake() -> None:
    with pytest.raises(HanayoError, match="nothing says how many processes"):
        topology_of(HanayoStrategy().options, None)


class Own(Callback):
    pass


class Unpicklable(Callback):
    def __init__(self) -> None:
        self.function = lambda: None


def test_the_users_own_callbacks_are_kept_if_they_can_be_sent() -> None:
    own = Own()
    assert select_callbacks([own, EarlyStopping("x"), Unpicklable()]) == ((own,), ("Unpicklable",))

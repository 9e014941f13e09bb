"""Where several lists could be the stack, a fork of rank 0 runs the step on the first batch, and tells which it calls.

rank 0    set-up | waits ............................... | the names, to all ranks
fork               reads a batch, runs the step, ends
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.lightning.loaders import first_batch
from lightning_hanayo.strategy.uncut_step import called_stacks
from tests.harness import models
from tests.harness.models import MLP, NUM_BLOCKS, WIDTH, Batch, Block
from tests.harness.oracle import plain
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, Training, assert_close, make_trainer, run

VECTORS = partial(models.vectors, (8, 8, 6))


class Gated(nn.Module):
    """A block of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gates[0](x) * self.gates[1](x).sigmoid()


class Hybrid(MLP):
    """Blocks of two classes, one of which has a list inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((Block, Gated)[i % 3 == 2]() for i in range(NUM_BLOCKS))


class WithTower(MLP):
    """Its largest list isn't called."""

    def __init__(self) -> None:
        super().__init__()
        self.images = nn.ModuleList(Block() for _ in range(2 * NUM_BLOCKS))


class Built(MLP):
    """The same, built on the meta device."""

    def __init__(self) -> None:
        LightningModule.__init__(self)

    def configure_model(self) -> None:
        if not self._modules:
            with torch.device("meta"):
                self._modules.update(WithTower()._modules)


class NeedsValues(WithTower):
    """Its step looks at values."""

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) * (2 if float(batch["x"].sum()) > 1e9 else 1)


class Leaves(NeedsValues):
    """It leaves something behind, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def loss(self, batch: Batch) -> Tensor:
        self.seen.append(len(batch["x"]))
        return super().loss(batch)


class Drawn(Dataset[Any]):
    """Counts what is read, and draws numbers of its own."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        self.num_read = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        return {"x": torch.randn(WIDTH, generator=self.random), "y": torch.tensor(0)}


class Stream(IterableDataset[Any]):
    """Can't be read twice."""

    def __iter__(self) -> Iterator[Any]:
        yield from models.vectors((8, 8))


@pytest.mark.parametrize("model", [Hybrid, WithTower])
def test_trains_as_in_one_process(pool: Pool, model: Any) -> None:
    training = Training(model, VECTORS, torch.float64, steps=2)
    assert_close(run(pool, training, Layout(2)).weights, plain(pool, training).weights, 1e-10)


def stack_of(model: Any, dataset: Any, batch_size: int | None) -> tuple[str, int]:
    """The stack that a run cuts, and how often its dataset was read by the rank itself."""
    module, trainer = model(), make_trainer(Layout(2), max_steps=1)
    trainer.fit(module, DataLoader(dataset, batch_size))
    return trainer.strategy.pipeline.ownership.stack.name, dataset.num_read


@pytest.mark.parametrize("model", [Built, NeedsValues])
def test_all_ranks_cut_alike_and_rank_0_reads_its_batch_once(pool: Pool, model: Any) -> None:
    assert pool.run(2, stack_of, model, Drawn(), 4) == [("blocks", 4), ("blocks", 0)]


def test_an_error_of_a_stack_that_is_not_called_names_one_that_is(pool: Pool) -> None:
    said = r"ended after 0 of the 16 blocks of images.* HanayoStrategy\(blocks='blocks'\)"
    with pytest.raises(RunFailed, match=said):
        pool.run(2, stack_of, WithTower, Stream(), None)


def test_nothing_remains_of_the_look_ahead(capfd: pytest.CaptureFixture[str]) -> None:
    module, dataset = Leaves(), Drawn()
    before, state = dataset.random.get_state(), torch.get_rng_state()

    def take_batch() -> Any:
        print("said in the fork")
        return next(iter(DataLoader(dataset, batch_size=4)))

    assert called_stacks(module, take_batch) == ["blocks", "blocks"]
    assert (module.seen, dataset.num_read) == ([], 0)
    assert torch.equal(dataset.random.get_state(), before) and torch.equal(torch.get_rng_state(), state)
    assert not capfd.readouterr().out


def test_a_step_that_fails_tells_nothing() -> None:
    assert called_stacks(WithTower(), lambda: {"x": "no tensor"}) == ()


def test_a_stream_is_read_once() -> None:
    module, trainer = WithTower(), Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer.training = True
    trainer.strategy._lightning_module = module
    for dataset, batches in ((Stream(), 0), (Drawn(), 1)):
        trainer._data_connector.attach_dataloaders(module, train_dataloaders=DataLoader(dataset, batch_size=4))
        if batches:
            assert first_batch(trainer, module)["x"].shape == (4, WIDTH)
        else:
            with pytest.raises(UnsupportedError, match="a stream"):
                first_batch(trainer, module)

"""The Trainer's loops call the same hooks with the same batches as one process, or as each rank of DDP.

P=2         compared with one process         P=2, D=2    each data rank is compared with a rank of DDP
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, assert_close, make_strategy, make_trainer, merge_owned, own_weights

PIPE, DATA = Layout(2), Layout(2, data=2)
TIMES = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
HOOKS = tuple(f"on_{stage}_{when}" for stage in ("train", "validation", "test", "predict") for when in TIMES)


def samples(count: int) -> list[dict[str, Tensor]]:
    """Samples that know their index."""
    (batch,) = models.vectors((count,), torch.float64)
    batch["i"] = torch.arange(count)
    return [dict(zip(batch, sample, strict=True)) for sample in zip(*batch.values(), strict=True)]


def loader(count: int = 20, size: int = 4, **options: Any) -> Any:
    return DataLoader(samples(count), batch_size=size, **options)  # type: ignore[arg-type]


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, count: int = 12) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from samples(self.count)


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.count


class OddBatches(BatchSampler):
    """Batches of one sample, of two, and of three."""

    def __init__(self, sampler: Any, batch_size: int = 2, drop_last: bool = False) -> None:
        super().__init__(sampler, batch_size, drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        while indices:
            for size in (1, 2, 3):
                if indices:
                    yield indices[:size]
                    del indices[:size]

    def __len__(self) -> int:
        return len(list(iter(self)))


class Model(models.MLP):
    """Trains and evaluates on batches of one loader or of several."""

    def training_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        given = parts(batch)
        loss = self.loss({key: torch.cat([part[key] for part in given]) for key in ("x", "y")})
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        for part in parts(batch):
            self.log("loss", self.loss(part), batch_size=len(part["x"]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch["x"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def parts(batch: Any) -> list[dict[str, Tensor]]:
    """The batches of all loaders that have not ended."""
    if isinstance(batch, dict) and "x" in batch:
        return [batch]
    values = batch.values() if isinstance(batch, dict) else batch or ()
    return [one for value in values for one in parts(value)]


class Watch(Callback):
    """Writes down which hooks are called, where the Trainer is, and the samples of its batch."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.samples: list[Any] = []

    def note(self, hook: str, trainer: Trainer, *args: Any) -> None:
        self.calls.append((hook, trainer.global_step, trainer.current_epoch, trainer.is_last_batch))
        if hook.endswith("batch_start") and getattr(trainer.strategy, "pipe_rank", 0) == 0:
            batch, *numbers = args
            self.samples.append((hook, [part["i"].tolist() for part in parts(batch)], *numbers))


def _noting(hook: str) -> Callable[..., None]:
    return lambda watch, trainer, module, *args: watch.note(hook, trainer, *args)


class WatchAll(Watch):
    """All hooks."""


for _hook in HOOKS:
    setattr(WatchAll, _hook, _noting(_hook))


class Data(LightningDataModule):
    """Writes down which of its hooks are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def setup(self, stage: str) -> None:
        self.calls.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.calls.append(f"teardown {stage}")

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] * 1.5}

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {**batch, "x": batch["x"] + 0.5}

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return loader(12 + 8 * self.trainer.current_epoch, shuffle=True)

    def val_dataloader(self) -> Any:
        return [loader(8), loader(6, 3)]

    def test_dataloader(self) -> Any:
        return loader(10)

    def predict_dataloader(self) -> Any:
        return loader(9)


MakeTrainer = Callable[..., Trainer]
Run = Callable[[MakeTrainer, LightningModule], Any]


def fit(trainer: MakeTrainer, module: LightningModule, train: Any = None, val: Any = None, **options: Any) -> Any:
    one = trainer(**{"max_epochs": 2} | options)
    one.fit(module, (train or loader)(), (val or partial(loader, 16))())
    loop = one.fit_loop
    return (
        loop.done,
        loop.total_batch_idx,
        one.global_step,
        one.current_epoch,
        one.num_training_batches,
        one.num_val_batches,
    )


def several(mode: Any, sizes: tuple[int, ...] = (12, 20)) -> Any:
    return CombinedLoader({str(size): loader(size) for size in sizes}, mode)


def sequence() -> Any:
    return CombinedLoader([loader(12), loader(8, 3)], "sequential")


def stream(kind: type[Stream] = Stream, count: int = 12, **options: Any) -> Any:
    return DataLoader(kind(count), batch_size=4, **options)


def odd() -> Any:
    return DataLoader(samples(13), batch_sampler=OddBatches(SequentialSampler(range(13)), 2))  # type: ignore[arg-type]


def data_module(trainer: MakeTrainer, module: LightningModule) -> Any:
    data = Data()
    one = trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    validated = one.validate(module, datamodule=data, verbose=False)
    one.fit(module, datamodule=data)
    return data.calls, validated, one.test(module, data, verbose=False), one.predict(module, data)


def other_trainers(trainer: MakeTrainer, module: LightningModule) -> Any:
    trainer(max_epochs=1).fit(module, loader(), loader(8))
    tested = trainer().test(module, [loader(8), loader(6, 4)], verbose=False)
    predicted = trainer(limit_predict_batches=2).predict(module, [loader(9), loader(10)])
    return tested, trainer().validate(module, loader(10), verbose=False), predicted


def stopped(trainer: MakeTrainer, module: LightningModule) -> Any:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.should_stop or trainer.global_step == 3

    return fit(trainer, module, callbacks=[Stops()], min_epochs=2, max_epochs=4)


def continued(trainer: MakeTrainer, module: LightningModule) -> Any:
    """A Trainer that goes on for more epochs, with another loader."""
    one = trainer(max_epochs=1)
    one.fit(module, loader(), loader(8))
    one.fit_loop.max_epochs = 3
    one.fit(module, loader(12), loader(4))
    return one.fit_loop.done, one.global_step


class Changing(Model):
    """Validates on one loader more in each epoch."""

    def val_dataloader(self) -> Any:
        return [loader(8) for _ in range(1 + self.trainer.current_epoch)]


def changing(trainer: MakeTrainer, module: LightningModule) -> Any:
    one = trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1)
    one.fit(models.build(Changing, torch.float64), loader())
    return one.global_step


class PerRank(Model):
    """Reads more batches on later data ranks."""

    def val_dataloader(self) -> Any:
        return stream(count=8 + 8 * self.data_rank)

    test_dataloader = predict_dataloader = val_dataloader

    @property
    def data_rank(self) -> int:
        return getattr(self.trainer.strategy, "distributed_sampler_kwargs", {"rank": 0})["rank"]


def uneven(trainer: MakeTrainer, module: LightningModule) -> Any:
    """Evaluation on as many batches as each data rank has."""
    own = models.build(PerRank, torch.float64)
    one = trainer(max_epochs=1)
    one.fit(own, loader())
    return one.test(own, verbose=False), one.predict(own)


def empty(trainer: MakeTrainer, module: LightningModule) -> Any:
    one = trainer(max_epochs=1, limit_test_batches=0, limit_predict_batches=0)
    one.fit(module, loader(), [])
    return one.test(module, loader(), verbose=False), one.predict(module, loader())


RUNS: dict[str, Run] = {
    "no batches": empty,
    "uneven evaluation": uneven,
    "a mapping of loaders": partial(fit, train=lambda: {"a": loader(12), "b": loader(20)}),
    "a list of loaders": partial(fit, train=lambda: [loader(12), {"b": loader(20)}]),
    "validation by time": partial(fit, val_check_interval={"seconds": 0}, max_epochs=3),
    "validation by time, never": partial(fit, val_check_interval="00:10:00:00", max_epochs=3),
    "validated on other loaders in each epoch": changing,
    "a data module": data_module,
    "other trainers": other_trainers,
    "stopped": stopped,
    "continued": continued,
    "max_time": partial(fit, max_time={"seconds": 0}, max_epochs=-1),
    "max_steps": partial(fit, max_steps=7, max_epochs=None),
    "min_steps": partial(fit, min_steps=12, max_epochs=4, max_time={"seconds": 0}),
    "limits in batches": partial(fit, limit_train_batches=3, limit_val_batches=1),
    "limits in parts": partial(fit, limit_train_batches=0.5, limit_val_batches=0.5),
    "no training batches": partial(fit, limit_train_batches=0),
    "no validation batches": partial(fit, limit_val_batches=0),
    "overfit": partial(fit, overfit_batches=2),
    "overfit a part": partial(fit, overfit_batches=0.5),
    "validation after batches": partial(fit, val_check_interval=3, check_val_every_n_epoch=None, max_epochs=3),
    "validation in parts of an epoch": partial(fit, val_check_interval=0.4, accumulate_grad_batches=2),
    "validation every other epoch": partial(fit, check_val_every_n_epoch=2, max_epochs=4),
    "fast_dev_run": partial(fit, fast_dev_run=True),
    "a full sanity check": partial(fit, num_sanity_val_steps=-1, val=lambda: [loader(20), loader(8)]),
    "barebones": partial(fit, barebones=True),
    "max_size_cycle": partial(fit, train=partial(several, "max_size_cycle"), val=partial(several, "max_size_cycle")),
    "min_size": partial(fit, train=partial(several, "min_size"), val=partial(several, "min_size")),
    "max_size": partial(fit, train=partial(several, "max_size"), val=partial(several, "max_size")),
    "sequential": partial(fit, val=sequence),
    "streams": partial(fit, train=stream, val=partial(stream, Stream), limit_val_batches=2),
    "sized streams": partial(fit, train=partial(stream, SizedStream), val=partial(stream, SizedStream)),
    "streams validated after batches": partial(fit, train=stream, val_check_interval=2, limit_train_batches=4),
    "own samplers": partial(fit, train=odd, val=odd, use_distributed_sampler=False),
    "shuffled": partial(fit, train=partial(loader, shuffle=True, drop_last=True)),
    "not distributed": partial(fit, train=partial(loader, 10), use_distributed_sampler=False),
    "workers": partial(fit, train=partial(loader, num_workers=2, persistent_workers=True)),
}


@dataclass
class Seen:
    """What one rank has seen."""

    calls: list[Any]
    samples: list[Any]
    weights: dict[str, Tensor]
    metrics: dict[str, float]
    returned: Any


QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"))


def play(kind: str, layout: Layout, ddp: bool = False) -> Seen:
    """One rank's part of a run; `ddp`: of two with Lightning's own strategy."""
    warnings.simplefilter("ignore", UserWarning)  # Lightning's advice on loaders and intervals
    made, watch = [], WatchAll()

    def trainer(callbacks: Any = (), **options: Any) -> Trainer:
        strategy = {"strategy": "ddp", "devices": 2} if ddp else {}
        if layout.world_size > 1:
            strategy = {"strategy": make_strategy(layout)}
        own = QUIET if options.get("barebones") else {"callbacks": [watch, *callbacks]}
        made.append(make_trainer(layout, **strategy, **{"use_distributed_sampler": True} | own | options))
        return made[-1]

    torch.manual_seed(1)
    returned = RUNS[kind](trainer, models.build(Model, torch.float64))
    metrics = {name: float(value) for name, value in made[-1].callback_metrics.items()}
    weights = own_weights(made[-1].lightning_module, None if ddp or layout.world_size == 1 else made[-1])
    return Seen(watch.calls, watch.samples, weights, metrics, returned)


def assert_same(found: Seen, expected: Seen, *, first: bool) -> None:
    assert found.calls == expected.calls
    if first:
        assert found.samples == expected.samples
        assert_equal(found.returned, expected.returned)
    assert found.metrics == pytest.approx(expected.metrics, abs=1e-9)


def assert_equal(found: Any, expected: Any) -> None:
    """Figures and tensors within 1e-9, in containers of any kind."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            assert_equal(*pair)
    else:
        assert found == (pytest.approx(expected, abs=1e-9) if isinstance(expected, dict | float) else expected)


@pytest.mark.parametrize(
    ("kind", "layout"), covered(product(RUNS, (PIPE, DATA)), by=[("a data module", PIPE)]), ids=str
)
def test_loops_see_the_same(pool: Pool, kind: str, layout: Layout) -> None:
    references = pool.run(layout.data, play, kind, Layout(), layout.data > 1)
    ranks = pool.run(layout.world_size, play, kind, layout)
    for rank, seen in enumerate(ranks):
        data_rank, pipe_rank, *_ = layout.topology.coordinates(rank)
        assert_same(seen, references[data_rank], first=pipe_rank == 0)
    for data_rank, reference in enumerate(references):
        own = [one.weights for rank, one in enumerate(ranks) if layout.topology.coordinates(rank)[0] == data_rank]
        assert_close(merge_owned(own), reference.weights, 1e-9)

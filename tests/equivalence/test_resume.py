"""A run that is interrupted and resumed on the same layout equals the one that was not, to the last bit.

                 batches   0 1 2 3 4 | 5 6 7 8 9 | ...
uninterrupted              x x x x x | x x x x x | x x x x x
interrupted      save              ^       ^                       after an epoch, in mid-epoch, in mid-accumulation
resumed                              | x x x x x | x x x x x       weights and losses from there on are the same
"""

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning import Callback, seed_everything
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, data_rank, make_strategy, make_trainer, own_weights

NUM_BATCHES, SIZE = 5, 4


class Samples(Dataset[models.Batch]):
    """Draws noise from Python's and NumPy's generators with each sample that it gives."""

    def __init__(self, rank: int) -> None:
        batch = models.vectors((2 * NUM_BATCHES * SIZE,))[0]
        self.batch = {name: value[rank::2] for name, value in batch.items()}

    def __len__(self) -> int:
        return NUM_BATCHES * SIZE

    def __getitem__(self, index: int) -> models.Batch:
        noise = random.random() + float(np.random.rand())
        return {"x": self.batch["x"][index] + 0.1 * noise, "y": self.batch["y"][index]}


class StatefulLoader:
    """Shuffles in each epoch, and says where it is, as torchdata's StatefulDataLoader does."""

    batch_size = SIZE

    def __init__(self, dataset: Samples) -> None:
        self.dataset = dataset
        self._order: list[int] = []
        self._position = 0
        self._loaded = False

    def __iter__(self) -> Iterator[models.Batch]:
        if not self._loaded:
            self._order, self._position = torch.randperm(len(self.dataset)).tolist(), 0
        self._loaded = False
        while self._position < NUM_BATCHES:
            start = SIZE * self._position
            self._position += 1
            samples = [self.dataset[i] for i in self._order[start : start + SIZE]]
            yield {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._position, self._loaded = state["order"], state["position"], True


class SizedLoader(StatefulLoader):
    def __len__(self) -> int:
        return NUM_BATCHES


def plain_loader(dataset: Samples) -> DataLoader[models.Batch]:
    return DataLoader(dataset, batch_size=SIZE, shuffle=True)


def loader_with_generator(dataset: Samples) -> DataLoader[models.Batch]:
    return DataLoader(dataset, batch_size=SIZE, shuffle=True, generator=torch.Generator().manual_seed(7))


LOADERS = {"generator": loader_with_generator, "plain": plain_loader, "sized": SizedLoader, "unsized": StatefulLoader}


class DroppingBlock(models.Block):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(super().forward(x), 0.1, self.training)


class Dropping(models.MLP):
    """Dropout in front of the stack, in the blocks, and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DroppingBlock() for _ in range(models.NUM_BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(self.embedding(x), 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        return self.head(functional.dropout(x, 0.1, self.training))

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


@dataclass
class Seen:
    """What a run has trained, by the number of the batch since the start."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """epoch, batch in the epoch, optimizer step"""


class Watch(Callback):
    """Notes each batch's loss, and saves where it is told to."""

    def __init__(self, save: "Save", folder: Path) -> None:
        self.seen = Seen()
        self.save, self.folder = save, folder

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        number = trainer.fit_loop.epoch_loop.total_batch_idx
        self.seen.losses[number] = outputs["loss"].clone()
        self.seen.steps.append((trainer.current_epoch, batch_idx, trainer.global_step))
        self._save(trainer, "on_train_batch_end")

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._save(trainer, "on_train_epoch_start")

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._save(trainer, "on_train_epoch_end")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._save(trainer, "on_validation_end")

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.seen.weights = own_weights(module, trainer)

    def _save(self, trainer: Any, hook: str) -> None:
        if hook == self.save.hook and trainer.fit_loop.epoch_loop.total_batch_idx == self.save.batch:
            trainer.save_checkpoint(self.folder / "saved.ckpt")


@dataclass(frozen=True)
class Save:
    """When the checkpoint is saved."""

    hook: str
    batch: int
    """after this one, counted from the start"""

    def __str__(self) -> str:
        return f"{self.hook}-{self.batch}"


def fit(layout: Layout, loader: str, save: Save, folder: Path, options: dict[str, Any], resume: bool) -> Seen:
    options = dict(options)
    own = {name: options.pop(name) for name in ("save_full", "master_weights") if name in options}
    model, schedule = options.pop("model", Dropping), options.pop("schedule", None)
    warnings.filterwarnings("ignore", message=".*dataloader is not resumable")
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")
    seed_everything(100 * resume + data_rank(layout))
    watch = Watch(save, folder)
    callbacks = [watch, *([GradientAccumulationScheduler(schedule)] if schedule else [])]
    trainer = make_trainer(
        layout, strategy=make_strategy(layout, **own), callbacks=callbacks, num_sanity_val_steps=0, **options
    )
    module = models.build(model)
    torch.manual_seed(100 * resume + data_rank(layout))
    validation = [DataLoader(Samples(0), batch_size=SIZE)] if "val_check_interval" in options else []
    path = folder / "saved.ckpt" if resume else None
    trainer.fit(module, LOADERS[loader](Samples(data_rank(layout))), *validation, ckpt_path=path)
    return watch.seen


def assert_resumed_run_is_equal(
    pool: Pool, folder: Path, layout: Layout, loader: str, save: Save, **options: Any
) -> None:
    """Both runs end with the same weights, and all losses after the checkpoint are equal."""
    options = {"max_epochs": 3} | options
    whole = pool.run(layout.world_size, fit, layout, loader, save, folder, options, False)
    rest = pool.run(layout.world_size, fit, layout, loader, save, folder, options, True)
    for before, after in zip(whole, rest, strict=True):
        left = before.steps[save.batch + 1 :]
        assert after.steps == left
        assert list(after.losses) == list(before.losses)[save.batch + 1 :]
        for number, loss in after.losses.items():
            assert torch.equal(loss, before.losses[number]), f"batch {number}"
        assert after.weights.keys() == before.weights.keys()
        assert all(torch.equal(after.weights[name], value) for name, value in before.weights.items())


WAVES = Layout(2, 2, 1)
CUBE = Layout(1, 1, 1, cube=(1, 2, 1))
DATA = Layout(1, 1, 2)
DATA_CUBE, WAVE_CUBE = Layout(1, 1, 2, cube=(1, 2, 1)), Layout(2, 1, 1, cube=(2, 1, 1), outside="replicate")
MID_EPOCH, EPOCH_END = Save("on_train_batch_end", 6), Save("on_train_epoch_end", 4)


LAYOUTS = [Layout(1), WAVES, CUBE, DATA]
MIDDLES = [
    *product(LAYOUTS, ["sized", "unsized"], [1, 2]),
    *product([DATA_CUBE, WAVE_CUBE], ["sized"], [2]),
]
ENDS = list(product(LAYOUTS, LOADERS, ["max_epochs", "max_steps"]))


@pytest.mark.parametrize(
    ("layout", "loader", "accumulate"),
    covered(MIDDLES, by=[(WAVES, "unsized", 2)]),
    ids=str,
)
def test_in_the_middle_of_an_epoch(pool: Pool, tmp_path: Path, layout: Layout, loader: str, accumulate: int) -> None:
    """With 2 batches per step also in the middle of an accumulation."""
    assert_resumed_run_is_equal(pool, tmp_path, layout, loader, MID_EPOCH, accumulate_grad_batches=accumulate)


@pytest.mark.thorough
@pytest.mark.parametrize("layout", [WAVES, CUBE, DATA_CUBE, WAVE_CUBE], ids=str)
@pytest.mark.parametrize(
    "options",
    [{"save_full": True}, {"master_weights": "fp32", "precision": "bf16-true"}, {"gradient_clip_val": 0.1}],
    ids=str,
)
def test_in_the_middle_of_an_accumulation(pool: Pool, tmp_path: Path, layout: Layout, options: dict[str, Any]) -> None:
    """In one file; with gradients in fp32 of parameters in bf16; with clipping."""
    assert_resumed_run_is_equal(pool, tmp_path, layout, "sized", MID_EPOCH, accumulate_grad_batches=2, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "loader", "limit"),
    ENDS,
    ids=str,
)
def test_at_the_end_of_an_epoch(pool: Pool, tmp_path: Path, layout: Layout, loader: str, limit: str) -> None:
    options = {"max_epochs": 3} if limit == "max_epochs" else {"max_epochs": -1, "max_steps": 15}
    assert_resumed_run_is_equal(pool, tmp_path, layout, loader, EPOCH_END, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("layout", "loader", "save"),
    [*product([Layout(2), CUBE, DATA], ["sized", "unsized"], [Save("on_train_epoch_end", 5), MID_EPOCH])],
    ids=str,
)
def test_of_epochs_that_do_not_read_all_batches(
    pool: Pool, tmp_path: Path, layout: Layout, loader: str, save: Save
) -> None:
    """The epoch after them begins with new data, though the loader is in the middle of its own."""
    assert_resumed_run_is_equal(pool, tmp_path, layout, loader, save, limit_train_batches=3)


HABITS = {
    "in on_validation_end, in mid-epoch": (Save("on_validation_end", 6), {"val_check_interval": 2}),
    "in on_validation_end, after the last batch": (Save("on_validation_end", 4), {"val_check_interval": NUM_BATCHES}),
    "after the last batch": (Save("on_train_batch_end", 4), {}),
    "before validation in mid-epoch": (Save("on_train_batch_end", 6), {"val_check_interval": 2}),
    "in on_train_epoch_start": (Save("on_train_epoch_start", 4), {"val_check_interval": NUM_BATCHES}),
    "in on_train_epoch_end, with validation": (Save("on_train_epoch_end", 4), {"val_check_interval": NUM_BATCHES}),
}


@pytest.mark.parametrize(
    ("habit", "loader", "limit"),
    covered(
        [
            (habit, loader, limit)
            for habit, loader, limit in product(HABITS, LOADERS, ["max_epochs", "max_steps"])
            if HABITS[habit][0].batch == NUM_BATCHES - 1 or loader in ("sized", "unsized")  # others have no position
        ],
        by=[(list(HABITS)[1], kind, "max_steps") for kind in ("sized",)],
    ),
)
def test_habits_of_saving(pool: Pool, tmp_path: Path, habit: str, loader: str, limit: str) -> None:
    save, options = HABITS[habit]
    limits = {"max_epochs": 3} if limit == "max_epochs" else {"max_epochs": -1, "max_steps": 15}
    assert_resumed_run_is_equal(pool, tmp_path, Layout(2), loader, save, **limits, **options)


class Waiting(Dropping):
    """Its learning rate falls with each value of a metric; `interval` is when the scheduler looks at it."""

    interval = "epoch"

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": self.interval, "monitor": "train_loss"},
        }


class WaitingInSteps(Waiting):
    interval = "step"


@pytest.mark.parametrize(
    ("model", "save", "options"),
    covered(
        [
            *product([Waiting, WaitingInSteps], [MID_EPOCH, EPOCH_END], [{}, {"val_check_interval": 2}]),
            *product([Waiting, WaitingInSteps], [Save("on_validation_end", 6)], [{"val_check_interval": 2}]),
        ],
        by=[],
    ),
    ids=str,
)
def test_schedulers_that_wait_for_a_metric(
    pool: Pool, tmp_path: Path, model: Any, save: Save, options: dict[str, Any]
) -> None:
    """The metric that they have seen last, or were about to see, is in the checkpoint."""
    assert_resumed_run_is_equal(pool, tmp_path, Layout(2), "sized", save, model=model, **options)


@pytest.mark.thorough
@pytest.mark.parametrize("save", [MID_EPOCH, EPOCH_END, Save("on_train_epoch_end", 9)], ids=str)
def test_accumulation_that_changes_by_epoch(pool: Pool, tmp_path: Path, save: Save) -> None:
    assert_resumed_run_is_equal(pool, tmp_path, Layout(2), "sized", save, schedule={0: 1, 1: 2})


@pytest.mark.thorough
def test_more_steps_than_max_steps_allowed_at_first(pool: Pool, tmp_path: Path) -> None:
    """7 steps, and then 15 in all, equal 15 at once: the epoch that `max_steps` has cut goes on."""
    save = Save("on_train_epoch_end", 6)
    runs = [({"max_steps": 15}, False), ({"max_steps": 7}, False), ({"max_steps": 15}, True)]
    whole, _, rest = (
        pool.run(2, fit, Layout(2), "sized", save, tmp_path, {"max_epochs": -1} | options, resume)[0]
        for options, resume in runs
    )
    assert rest.steps == whole.steps[7:]
    assert all(torch.equal(rest.losses[number], whole.losses[number]) for number in rest.losses)

"""Trains in each mode of `ModelCheckpoint`, and reports the checkpoints that are left."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from tests.harness import models
from tests.harness.training import Layout, data_rank, make_loader, make_strategy, make_trainer

SCORES = [2.0, 4.0, 1.0, 3.0]
"""what is monitored, one per epoch: the best isn't the last, for either mode"""


class Scored(models.MLP):
    """Logs a score that is the same on all layouts."""

    def validation_step(self, batch: models.Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        self.log("score", SCORES[self.current_epoch], sync_dist=True)


@dataclass(frozen=True)
class Mode:
    """One way of saving: the callbacks that are made for a folder, and the runs that follow each other in it."""

    callbacks: Callable[[Path], list[ModelCheckpoint]]
    runs: tuple[dict[str, Any], ...] = ({},)
    """options of the Trainer; with "resume" the name of the checkpoint that `fit` is given"""


def saves(*options: dict[str, Any], runs: tuple[dict[str, Any], ...] = ({},), last: str = "last") -> Mode:
    """A callback for each of the `options`; `last` is the name of the last checkpoint."""

    def callbacks(folder: Path) -> list[ModelCheckpoint]:
        made = [ModelCheckpoint(folder, **one) for one in options]
        for callback in made:
            callback.CHECKPOINT_NAME_LAST = last
        return made

    return Mode(callbacks, runs)


BEST: dict[str, Any] = {"monitor": "score", "filename": "{epoch}-{score:.0f}"}
RESUMED: tuple[dict[str, Any], ...] = ({"max_epochs": 2}, {"max_epochs": 4, "resume": "last.ckpt"})

MODES: dict[str, Mode] = {
    "by default": saves({}),
    "the lowest": saves(BEST),
    "the highest three": saves(BEST | {"mode": "max", "save_top_k": 3}),
    "all": saves({"save_top_k": -1, "save_last": True}),
    "only the last": saves({"save_top_k": 0, "save_last": True}),
    "a link to the last": saves({"save_last": "link"}),
    "a link to the last of the best": saves(BEST | {"save_last": "link", "save_top_k": 2}),
    "names of the last": saves({"save_top_k": 0, "save_last": True}, last="{epoch}-last"),
    "every third step": saves({"every_n_train_steps": 3, "save_top_k": -1}),
    "at time intervals": saves({"train_time_interval": timedelta(0), "save_top_k": -1, "save_last": True}),
    "every other epoch": saves({"every_n_epochs": 2, "save_top_k": -1}),
    "at the end of training epochs": saves({"save_on_train_epoch_end": True, "monitor": "epoch", "mode": "max"}),
    "at the end of validation": saves(BEST | {"save_on_train_epoch_end": False, "save_last": True}),
    "weights only": saves({"save_weights_only": True, "save_last": True}),
    "one name": saves({"filename": "same", "enable_version_counter": False}),
    "versions of one name": saves({"filename": "same", "monitor": "score", "save_top_k": 2}),
    "two callbacks": saves(BEST, {"every_n_train_steps": 3, "save_last": True}),
    "a folder of an earlier run": saves({"save_last": True}, runs=({"max_epochs": 2}, {})),
    "resumed": saves({"save_last": True}, runs=RESUMED),
    "resumed from the best": saves(BEST | {"save_last": True, "save_top_k": 2}, runs=RESUMED),
    "resumed from a link": saves({"save_last": "link"}, runs=RESUMED),
}


@dataclass(frozen=True)
class Left:
    """What is in a folder of checkpoints, by name."""

    steps: dict[str, int]
    links: dict[str, str]
    """where they lead"""
    folders: set[str]

    @staticmethod
    def in_folder(path: Path) -> "Left":
        """Read all checkpoints in the folder, after all ranks have ended: rank 0 removes some at the end."""
        found = sorted(path.iterdir())
        links = {one.name: str(one.readlink()) for one in found if one.is_symlink()}
        folders = {one.name for one in found if one.is_dir() and not one.is_symlink()}
        return Left({one.name: step_of(one) for one in found}, links, folders)


def train_in(name: str, layout: Layout, folder: Path) -> list[dict[str, Any]]:
    """Train in a mode, and return what the callbacks say that they have saved. Called by all ranks."""
    with quiet():
        for run in MODES[name].runs:
            options = dict(run)
            start = options.pop("resume", None)
            callbacks = MODES[name].callbacks(folder)
            trainer, module = trainer_for(layout, callbacks, **options), models.build(Scored)
            fit(trainer, module, layout, start and folder / start)
    return [_paths(callback, folder) for callback in callbacks]


def trainer_for(layout: Layout, callbacks: list[Any], *, strategy: dict[str, Any] | None = None, **options: Any) -> Any:
    """A Trainer that saves. `strategy` has options of HanayoStrategy; None: one process has a plain Trainer."""
    own = {} if strategy is None else {"strategy": make_strategy(layout, **strategy)}
    defaults = {"max_epochs": len(SCORES), "enable_checkpointing": True, "num_sanity_val_steps": 0}
    return make_trainer(layout, callbacks=callbacks, **own | defaults | options)


def fit(trainer: Trainer, module: LightningModule, layout: Layout, start: Path | str | None = None) -> None:
    """Train on two batches per epoch, of which each data rank gets its samples."""
    rank = data_rank(layout)
    batches = [{key: value[rank :: layout.data] for key, value in one.items()} for one in models.vectors((8, 8))]
    loader: DataLoader[Any] = make_loader(batches)
    trainer.fit(module, loader, loader, ckpt_path=start)


def step_of(path: Path) -> int:
    """The global step of a checkpoint, all of whose bytes are checked."""
    if path.is_dir():
        folder = CheckpointFolder(path)
        folder.verify()
        return folder.manifest.step
    return int(torch.load(path, weights_only=True)["global_step"])


def _paths(callback: ModelCheckpoint, folder: Path) -> dict[str, Any]:
    """The callback's attributes, with paths relative to the folder."""

    def name(path: str) -> str:
        return str(Path(path).relative_to(folder)) if path else ""

    scores = {name(path): float(score) for path, score in callback.best_k_models.items()}
    best = None if callback.best_model_score is None else float(callback.best_model_score)
    paths = {key: name(getattr(callback, key)) for key in ("best_model_path", "kth_best_model_path", "last_model_path")}
    return paths | {"best_k_models": scores, "best_model_score": best}


@contextmanager
def quiet() -> Iterator[None]:
    """Inside it, Lightning may find checkpoints of an earlier run."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*exists and is not empty")
        yield

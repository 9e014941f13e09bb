"""Features: what is saved, and how runs go on from it."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint

from tests.features.feature import Differs, Feature, on
from tests.features.net import Net
from tests.features.trial import Trial, fit
from tests.features.with_callbacks import recording
from tests.harness.models import build

SAVES = {"enable_checkpointing": True}


def resume(trial: Trial) -> None:
    """One epoch, a checkpoint, and another Trainer that trains the second one."""
    fit(trial)
    path = trial.folder / "saved.ckpt"
    trial.trainer.save_checkpoint(path)
    trial.module = build(trial.feature.module)
    trial.trainer = trial.make_trainer(max_epochs=4)
    trial.trainer.fit(trial.module, datamodule=trial.data, ckpt_path=path)


def resume_with_weights_only(trial: Trial) -> None:
    fit(trial)
    path = trial.folder / "saved.ckpt"
    trial.trainer.save_checkpoint(path)
    trial.module = build(trial.feature.module)
    trial.trainer = trial.make_trainer(max_epochs=4)
    trial.trainer.fit(trial.module, datamodule=trial.data, ckpt_path=path, weights_only=True)


def resume_in_an_epoch(trial: Trial) -> None:
    """The checkpoint is from the second batch of the second epoch."""
    fit(trial)
    trial.module = build(trial.feature.module)
    trial.trainer = trial.make_trainer()
    (path,) = (trial.folder / "every").glob("*.ckpt")
    trial.trainer.fit(trial.module, datamodule=trial.data, ckpt_path=path)


def evaluate(which: str) -> Any:
    """A script that tests the best or the last checkpoint."""

    def script(trial: Trial) -> None:
        fit(trial)
        results = trial.trainer.test(datamodule=trial.data, ckpt_path=which, verbose=False)
        trial.record(results=results)

    return script


def read_file(trial: Trial) -> None:
    """The one file, read by `torch.load` and `load_from_checkpoint`."""
    fit(trial)
    path = trial.folder / "saved.ckpt"
    trial.trainer.save_checkpoint(path)
    trial.trainer.strategy.barrier()
    if trial.trainer.is_global_zero:
        saved = torch.load(path, weights_only=False)
        loaded = type(trial.module).load_from_checkpoint(path, map_location="cpu")
        trial.record(
            keys=sorted(saved),
            state=saved["state_dict"],
            optimizers=saved["optimizer_states"],
            schedulers=saved["lr_schedulers"],
            steps=(saved["epoch"], saved["global_step"]),
            loaded={name: value.clone() for name, value in loaded.state_dict().items()},
            loops=saved["loops"],
        )


def read_weights(trial: Trial) -> None:
    fit(trial)
    path = trial.folder / "weights.ckpt"
    trial.trainer.save_checkpoint(path, weights_only=True)
    trial.trainer.strategy.barrier()
    if trial.trainer.is_global_zero:
        saved = torch.load(path, weights_only=True)
        trial.record(keys=sorted(saved), state=saved["state_dict"])


def load_module(trial: Trial) -> None:
    """On all ranks, from what several of them have saved."""
    fit(trial)
    path = trial.folder / "saved.ckpt"
    trial.trainer.save_checkpoint(path)
    trial.trainer.strategy.barrier()
    loaded = type(trial.module).load_from_checkpoint(path)
    if trial.trainer.is_global_zero:
        trial.record(loaded={name: value.clone() for name, value in loaded.state_dict().items()})


BEST = recording(ModelCheckpoint, "best_model_path", "best_model_score", "best_k_models", "last_model_path")


def saved_names(trial: Trial) -> None:
    """The names of what is saved; folders of several ranks count as one."""
    fit(trial)
    trial.trainer.strategy.barrier()
    if trial.trainer.is_global_zero:
        trial.record(saved=sorted(path.name for path in trial.folder.rglob("*.ckpt")))


def stopped_by_exception(trial: Trial) -> None:
    try:
        fit(trial)
    except Exception:  # of this rank, or that another rank has failed
        if trial.trainer.is_global_zero:
            trial.record(saved=sorted(path.name for path in trial.folder.rglob("*.ckpt")))


def _stop(*_: Any) -> None:
    raise ValueError("stop")


class Remembers(Net):
    """Saves a value of its own in its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen_batches = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen_batches += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen_batches"] = self.seen_batches

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen_batches = checkpoint["seen_batches"]

    def on_train_end(self) -> None:
        self.trainer.logger.log_metrics({"seen_batches": self.seen_batches})  # type: ignore[union-attr]


def saves_best(folder: Path) -> dict[str, Any]:
    return SAVES | {"callbacks": ModelCheckpoint(folder, monitor="val_loss", save_last=True)}


FEATURES = [
    Feature(
        "`ModelCheckpoint(monitor=..., save_top_k=2, save_last=True)`",
        lambda folder: SAVES | {"callbacks": ModelCheckpoint(folder, monitor="val_loss", save_top_k=2, save_last=True)},
        script=BEST,
        note="paths and scores",
    ),
    Feature(
        "`ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)`",
        lambda folder: SAVES | {"callbacks": ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)},
        script=saved_names,
    ),
    Feature(
        "`ModelCheckpoint(train_time_interval=...)`",
        lambda folder: SAVES | {"callbacks": ModelCheckpoint(folder, train_time_interval=timedelta(seconds=0))},
        script=saved_names,
    ),
    Feature(
        "`ModelCheckpoint(save_weights_only=True)`",
        lambda folder: (
            SAVES | {"callbacks": ModelCheckpoint(folder, save_weights_only=True, filename="{epoch}-{step}")}
        ),
        script=saved_names,
    ),
    Feature(
        "`OnExceptionCheckpoint`",
        lambda folder: SAVES | {"callbacks": [OnExceptionCheckpoint(folder), LambdaCallback(on_train_epoch_end=_stop)]},
        script=stopped_by_exception,
        outcomes=on(Differs(("callback metrics",))),
        note="the same file; after the error `trainer.callback_metrics` has the epoch's means already",
    ),
    Feature("`save_checkpoint` and `fit(ckpt_path=...)`", script=resume),
    Feature("`fit(ckpt_path=..., weights_only=True)`", script=resume_with_weights_only),
    Feature(
        "resume in the middle of an epoch",
        lambda folder: SAVES | {"callbacks": ModelCheckpoint(folder / "every", every_n_train_steps=5)},
        script=resume_in_an_epoch,
    ),
    Feature("`on_save_checkpoint`, `on_load_checkpoint`", module=Remembers, script=resume),
    Feature('`ckpt_path="best"`', saves_best, script=evaluate("best")),
    Feature('`ckpt_path="last"`', saves_best, script=evaluate("last")),
    Feature("`save_checkpoint` and `load_from_checkpoint`", script=load_module),
    Feature(
        "one file (`save_full=True`), `load_from_checkpoint`",
        script=read_file,
        strategy={"save_full": True},
        note="what `torch.load` reads: states, loops, keys",
    ),
    Feature(
        "`save_checkpoint(weights_only=True)`", script=read_weights, note="what `torch.load(weights_only=True)` reads"
    ),
    Feature("resume with `save_full=True`", script=resume, strategy={"save_full": True}),
    Feature("resume with `save_async=True`", script=resume, strategy={"save_async": True}),
]

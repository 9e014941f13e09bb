"""Loggers and checkpoints that are folders: `log_model` uploads files alone and is refused, as is `log_graph`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.lightning.user_hooks import UPLOADS, loggers_with
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.training import Layout
from tests.strategy.checkpoints.saving_runs import Left, Scored, fit, trainer_for

PIPE = Layout(2)


def log(folder: Path) -> str:
    """Train with a logger, in whose folder ModelCheckpoint saves."""
    saving = ModelCheckpoint(save_last=True)
    folder.mkdir(exist_ok=True)
    trainer = trainer_for(PIPE, [saving], logger=CSVLogger(folder), log_every_n_steps=1, max_epochs=1)
    fit(trainer, models.build(Scored), PIPE)
    return str(saving.dirpath)


@pytest.mark.thorough
def test_checkpoints_are_folders_in_the_loggers_folder(pool: Pool, tmp_path: Path) -> None:
    dirpath, _ = pool.run(2, log, tmp_path / "logs")
    assert Path(dirpath).is_relative_to(tmp_path)
    assert Left.in_folder(Path(dirpath)).folders == {"epoch=0-step=2.ckpt", "last.ckpt"}


@pytest.mark.parametrize(
    ("options", "saves", "is_refused"),
    [
        ({}, [{}], True),
        ({}, [{"save_weights_only": True}, {"every_n_epochs": 2}], True),
        ({}, [{"save_weights_only": True}], False),
        ({"save_full": True}, [{}], False),
        ({}, [], False),
    ],
)
def test_log_model_is_refused_where_checkpoints_are_folders(
    options: dict[str, Any], saves: list[dict[str, Any]], is_refused: bool
) -> None:
    logger, callbacks = WandbLogger(log_model=True), [ModelCheckpoint(**one) for one in saves]
    trainer = trainer_for(PIPE, callbacks, strategy=options, logger=logger, enable_checkpointing=bool(saves))
    trainer.strategy.connect(models.build(Scored))
    if not is_refused:
        trainer.strategy._check(trainer)
        return
    with pytest.raises(UnsupportedError, match=r"WandbLogger\(log_model=...\) uploads checkpoints that are files"):
        trainer.strategy._check(trainer)


def test_log_graph_is_refused_where_no_rank_holds_the_whole_model(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger._log_graph = True  # type: ignore[attr-defined]  # as TensorBoardLogger, whose package may be missing
    trainer = trainer_for(PIPE, [], logger=logger, enable_checkpointing=False)
    module = models.build(Scored)
    module.example_input_array = torch.zeros(2, models.WIDTH)
    trainer.strategy.connect(module)
    with pytest.raises(UnsupportedError, match=r"CSVLogger\(log_graph=True\) runs the model"):
        trainer.strategy._check(trainer)


def test_the_logger_of_a_fast_development_run_uploads_no_checkpoints() -> None:
    assert not loggers_with(Trainer(logger=DummyLogger()), UPLOADS)

"""What each worker of Ray runs: an ordinary training with Lightning's environment plug-in for Ray.

Ray has joined the processes by then. `ray.train.lightning.prepare_trainer` is not called: it changes nothing, and
accepts the strategies of its own list alone.
"""

import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import ray.train
import torch
from ray.train.lightning import RayLightningEnvironment

from lightning_hanayo import HanayoStrategy
from recipes.gpt.data import TextData
from recipes.gpt.module import GPT


def train(config: dict[str, Any]) -> None:
    """Train on this worker, and report the loss; rank 0 also reports the weights.

    Args:
        config: `strategy`, `model`, `data` and `trainer`: the options of each; `workers`, the number on one node.
    """
    L.seed_everything(1)
    is_cpu = not torch.cuda.is_available()
    trainer = L.Trainer(
        accelerator="cpu" if is_cpu else "gpu",
        devices=config["workers"],
        strategy=HanayoStrategy(**config["strategy"]),
        plugins=[RayLightningEnvironment()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **config["trainer"],
    )
    trainer.fit(GPT(**config["model"]), TextData(**config["data"]))
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    whole = trainer.strategy.gather_model()  # type: ignore[attr-defined]
    if whole is None:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(whole.state_dict(), Path(folder, "weights.pt"))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))

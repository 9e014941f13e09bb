"""A training script that catches the error of its first run, in which rank 0 fails, and trains another module."""

import os
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hanayo import HanayoStrategy
from tests.harness.limits import stretch_grace


class Model(LightningModule):
    def __init__(self, failing_rank: int = -1) -> None:
        super().__init__()
        self.blocks, self.failing_rank = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), failing_rank

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == self.failing_rank:
            raise KeyError("the planned fault")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(module: Model) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=HanayoStrategy(), max_steps=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(torch.ones(16, 4), batch_size=8))  # type: ignore[arg-type]
    print(f"rank {trainer.global_rank} has trained {trainer.global_step} steps")


if __name__ == "__main__":
    with open(os.environ["START_FILE"], "a") as file:
        file.write(f"{os.getpid()}\n")
    stretch_grace()
    with suppress(Exception):
        train(Model(failing_rank=0))
    train(Model())

"""Models for `hanayo fit` that fail only after the processes have started: `Unsendable` and `LateError`."""

import os
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.harness.limits import stretch_grace, wait_until

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class UnsendableBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return object() if os.environ.get("LOCAL_RANK") == "1" else self.linear(x)


class Model(LightningModule):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Unsendable(Model):
    """A block on rank 1 returns an object that can't be sent to another rank."""

    def __init__(self) -> None:
        super().__init__()
        with open(os.environ["START_FILE"], "a") as file:
            file.write(f"{os.getpid()}\n")
        self.blocks = nn.ModuleList(UnsendableBlock() for _ in range(4))


class LateError(Unsendable):
    """A MisconfigurationException of Lightning, which rank 1 raises first."""

    def on_fit_start(self) -> None:
        stretch_grace()
        if self.global_rank == 0:
            wait_until(lambda: self.trainer.strategy.failures.first is not None, 60.0)
        raise MisconfigurationException("a monitor needs a logger")


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(16, WIDTH), batch_size=8)  # type: ignore[arg-type]

"""Models for `hanayo fit` whose mistake shows only in the processes: `late_errors.TooFew`, `late_errors.Odd`."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

WIDTH = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class OddBlock(Block):
    def forward(self, x: Tensor) -> Any:
        return object() if os.environ.get("LOCAL_RANK") == "1" else self.linear(x)


class Model(LightningModule):
    kind: type[Block] = Block

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TooFew(Model):
    """Three blocks for four stages, built when the processes run."""

    def configure_model(self) -> None:
        with open(os.environ["START_FILE"], "a") as file:
            file.write(f"{os.getpid()}\n")
        self.blocks = nn.ModuleList(Block() for _ in range(3))


class Odd(Model):
    """A block on rank 1 hands on what can't cross."""

    def __init__(self) -> None:
        super().__init__()
        with open(os.environ["START_FILE"], "a") as file:
            file.write(f"{os.getpid()}\n")
        self.blocks = nn.ModuleList(OddBlock() for _ in range(4))


class Data(LightningDataModule):
    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.randn(16, WIDTH), batch_size=8)  # type: ignore[arg-type]

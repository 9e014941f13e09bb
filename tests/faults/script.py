"""A user's training script that breaks on purpose:  script.py DEVICES PIPE DATA SITE RANK

SITE names where it breaks (see `SITES`), RANK on which rank; `nowhere` lets it finish. `sigterm` sends that rank the
signal, `asleep` lets the other ranks sleep in user code while it breaks.
"""

import os
import signal
import sys
import time
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_hanayo import HanayoStrategy

SITES = ("training_step", "forward", "backward", "loader", "hook", "optimizer", "sigterm", "asleep", "nowhere")
SITE, RANK = sys.argv[4], sys.argv[5]
WIDTH = 8


def maybe_break(site: str) -> None:
    """Fail here if this is the place, and note when."""
    if site == SITE and os.environ.get("LOCAL_RANK", "0") == RANK:
        with open(os.environ["FAULT_FILE"], "w") as file:
            file.write(str(time.time()))
        if site == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
            return
        raise RuntimeError("the vase " + f"broke on rank {RANK}")
    if site == SITE == "asleep":
        time.sleep(60)


class BreaksBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        maybe_break("backward")
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        maybe_break("forward")
        return BreaksBackward.apply(x + self.linear(x))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            maybe_break("training_step")
        x = batch
        for block in self.blocks:
            x = block(x)
        return functional.mse_loss(x, batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for site in ("hook", "asleep", "sigterm"):
                maybe_break(site)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        maybe_break("optimizer")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Vectors(Dataset[Tensor]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        if index == 9:
            maybe_break("loader")
        return torch.full((WIDTH,), float(index))


def main() -> None:
    with open(os.environ["START_FILE"], "a") as file:
        file.write(f"{os.getpid()}\n")
    devices, pipe, data = map(int, sys.argv[1:4])
    strategy = HanayoStrategy(pipeline_parallel_size=pipe, data_parallel_size=data, num_microbatches=4)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_steps=4, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(Vectors(), batch_size=8))
    print("finished")


if __name__ == "__main__":
    main()

"""A training script that fails on purpose:  script.py PIPE DATA SITE RANK [HOW]

SITE is one of `SITES`, the place where rank RANK fails; with `nowhere` it succeeds. `sigterm` and `sigint` send the
signal to that rank, `sigint twice` sends it again while the rank sleeps; with `asleep` the other ranks sleep in user
code while it fails.
"""

import os
import signal
import sys
import time
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from lightning_hanayo import HanayoStrategy
from tests.harness.limits import stretch_grace

SITES = (
    "training_step",
    "backward",
    "loader",
    "hook",
    "optimizer",
    "sigterm",
    "sigint",
    "sigint twice",
    "asleep",
    "nowhere",
)
WIDTH = 8
SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGSEGV": signal.SIGSEGV, "SIGSTOP": signal.SIGSTOP}


@dataclass(frozen=True)
class Fault:
    """Where a run fails, and on which rank."""

    site: str
    rank: str
    how: str = "error"
    """an error, one of `SIGNALS`, "leave" by `sys.exit`, or the code with which the process exits at once"""

    def at(self, site: str) -> None:
        """Fail here if this is the chosen site and rank, and write the time to FAULT_FILE."""
        if site == self.site and os.environ.get("LOCAL_RANK", "0") == self.rank:
            with open(os.environ.get("FAULT_FILE", os.devnull), "w") as file:
                file.write(str(time.time()))
            if site.startswith("sig"):
                self.send(site)
                return
            if self.how in SIGNALS:
                os.kill(os.getpid(), SIGNALS[self.how])
            elif self.how == "leave":
                sys.exit(3)
            elif self.how != "error":
                os._exit(int(self.how))
            raise RuntimeError("the planned " + f"fault on rank {self.rank}")
        if site == self.site == "asleep":
            time.sleep(3600)

    def send(self, site: str) -> None:
        """Send this process a signal; "twice": again, later than a terminal and a launcher would both do it."""
        number = signal.SIGTERM if site == "sigterm" else signal.SIGINT
        os.kill(os.getpid(), number)
        if site.endswith("twice"):
            time.sleep(1.5)
            os.kill(os.getpid(), number)
            time.sleep(3600)


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fault: Fault) -> Tensor:
        ctx.fault = fault
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.fault.at("backward")
        return gradient, None


class Block(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.linear, self.fault = nn.Linear(WIDTH, WIDTH), fault

    def forward(self, x: Tensor) -> Tensor:
        return FailsInBackward.apply(x + self.linear(x), self.fault)


class Model(LightningModule):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.blocks, self.fault = nn.ModuleList(Block(fault) for _ in range(8)), fault

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.fault.at("training_step")
        x = batch
        for block in self.blocks:
            x = block(x)
        return functional.mse_loss(x, batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            for site in ("hook", "asleep", "sigterm", "sigint", "sigint twice"):
                self.fault.at(site)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.fault.at("optimizer")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Vectors(Dataset[Tensor]):
    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        if index == 9:
            self.fault.at("loader")
        return torch.full((WIDTH,), float(index))


def train(pipe: int, data: int, fault: Fault, cube: tuple[int, int, int] = (1, 1, 1)) -> HanayoStrategy:
    """Train in one process; return its strategy."""
    strategy = HanayoStrategy(pipe, cube=cube, data_parallel_size=data, num_microbatches=4)
    trainer = Trainer(
        accelerator="cpu", devices=pipe * data * prod(cube), strategy=strategy, max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Model(fault), DataLoader(Vectors(fault), batch_size=8))
    return strategy


def main(pipe: str, data: str, site: str, rank: str, how: str = "error") -> None:
    with open(os.environ["START_FILE"], "a") as file:
        file.write(f"{os.getpid()}\n")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore it
    stretch_grace()
    train(int(pipe), int(data), Fault(site, rank, how))
    print("finished")


if __name__ == "__main__":
    main(*sys.argv[1:])

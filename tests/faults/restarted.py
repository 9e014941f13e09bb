"""A training script for torchrun and SLURM:  restarted.py FOLDER [--data D] [--nodes N] [--kill RANK STEP] [--plain]

Rank RANK is killed before step STEP in the first start, and its agent, too, if it is on another node than rank 0. Every
start adds a line to FOLDER/starts, and the last one writes the trained weights to FOLDER/trained.pt.
"""

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_hanayo import HanayoStrategy

WIDTH, SAMPLES, BATCH = 8, 48, 4


def number_of_start() -> str:
    """How often the launcher has started the run before."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT") or os.environ.get("SLURM_RESTART_COUNT", "0")


class Loader:
    """Shuffles in each epoch, and says where it is."""

    batch_size = BATCH

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.order: list[int] = []
        self.position = 0
        self.is_loaded = False

    def __len__(self) -> int:
        return len(self.data) // BATCH

    def __iter__(self) -> Iterator[Tensor]:
        if not self.is_loaded:
            self.order, self.position = torch.randperm(len(self.data)).tolist(), 0
        self.is_loaded = False
        while self.position < len(self):
            start = BATCH * self.position
            self.position += 1
            yield self.data[self.order[start : start + BATCH]]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position, self.is_loaded = state["order"], state["position"], True


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(torch.tanh(self.layer(x)), 0.1, self.training)


class Model(LightningModule):
    def __init__(self, options: Namespace) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.options = options

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.options.kill is None or number_of_start() != "0":
            return
        rank, step = self.options.kill
        if self.trainer.global_rank == rank and self.trainer.global_step == step:
            if os.environ.get("GROUP_RANK", "0") != "0":
                os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    def training_step(self, batch: Any) -> Tensor:
        x = batch if isinstance(batch, Tensor) else batch[0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(arguments: list[str]) -> None:
    parser = ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--data", default=1, type=lambda text: text if text == "auto" else int(text))
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--kill", type=int, nargs=2)
    parser.add_argument("--plain", action="store_true", help="a DataLoader, which doesn't say where it is")
    options = parser.parse_args(arguments)
    seed_everything(3)
    data = torch.rand(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    model = Model(options)
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["SLURM_NTASKS_PER_NODE"]),
        num_nodes=options.nodes,
        strategy=HanayoStrategy(2, data_parallel_size=options.data, num_microbatches=2),
        max_epochs=2,
        default_root_dir=str(options.folder),
        logger=CSVLogger(options.folder),
        callbacks=[ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    if trainer.global_rank == 0:
        with (options.folder / "starts").open("a") as file:
            print(number_of_start(), trainer.world_size, file=file)
    trainer.fit(model, DataLoader(TensorDataset(data), batch_size=BATCH) if options.plain else Loader(data))
    whole = trainer.strategy.gather_model()
    if whole is not None:
        torch.save({"weights": whole.state_dict(), "step": trainer.global_step}, options.folder / "trained.pt")


if __name__ == "__main__":
    main(sys.argv[1:])

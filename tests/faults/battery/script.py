"""The training script of the battery:  script.py LAYOUT KIND SITE RANK FOLDER

    step         1    2    3    4      5    6       7    8    9    10   11   12
    saved                  |                |                 |              |     ModelCheckpoint, every third step
    validated                               |                                |     at the end of each epoch
    the fault                       ^                                              sites within a step
                                                ^                                  save, on_train_epoch_end, ...
                                                                                ^  validation_step

LAYOUT is one of `LAYOUTS`; `ddp` and `model_parallel` are Lightning's own strategies, for comparison.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tests.faults.battery.fault import STEP, Fault, InBlock, spoilt
from tests.harness.limits import VARIABLE

WIDTH, BATCH, SAVE_EVERY = 16, 8, 3
TIMEOUT = timedelta(seconds=60.0 * float(os.environ.get(VARIABLE, "1")))
"""in seconds of an idle machine; the processes of a busy one start at different times"""
LAYOUTS = {
    "P=4": {"pipeline_parallel_size": 4},
    "P=2 D=2": {"pipeline_parallel_size": 2, "data_parallel_size": 2},
    "P=2 cube": {"pipeline_parallel_size": 2, "cube": (1, 2, 1)},
}


class Block(nn.Module):
    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.up, self.down, self.fault = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), fault

    def forward(self, x: Tensor) -> Tensor:
        return InBlock.apply(x + self.down(functional.gelu(self.up(x))), self.fault)


class Model(LightningModule):
    def __init__(self, fault: Fault, is_sharded: bool) -> None:
        super().__init__()
        self.blocks, self.fault, self.is_sharded = nn.ModuleList(Block(fault) for _ in range(8)), fault, is_sharded

    def configure_model(self) -> None:
        self.fault.at("configure_model")
        if self.is_sharded and not hasattr(self, "was_sharded"):
            from torch.distributed.fsdp import fully_shard

            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            self.was_sharded = True

    def setup(self, stage: str) -> None:
        self.fault.at("setup")

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = functional.mse_loss(self(batch), batch)
        return spoilt(loss, self.fault.at("training_step", STEP))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.trainer.current_epoch:  # the first one's batch is run dry, too: an error there is none of the run
            self.fault.at("validation_step")
        self.log("valid_loss", functional.mse_loss(self(batch), batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_fit_start(self) -> None:
        self.fault.at("on_fit_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fault.step = self.trainer.global_step
        _note_save(self.trainer)
        self.fault.at("on_train_batch_start", STEP)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.fault.at("on_before_optimizer_step", STEP):
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(torch.nan)

    def on_train_batch_end(self, *_: Any) -> None:
        self.fault.step = self.trainer.global_step
        self.fault.at("on_train_batch_end", STEP)

    def on_validation_start(self) -> None:
        self.fault.at("on_validation_start")

    def on_train_epoch_end(self) -> None:
        self.fault.at("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.fault.at("save", STEP)

    def on_fit_end(self) -> None:
        self.fault.at("on_fit_end")


def _note_save(trainer: Trainer) -> None:
    """Write down the step of the last save that must be whole."""
    if trainer.is_global_zero:
        step = trainer.global_step // SAVE_EVERY * SAVE_EVERY
        Path(os.environ["FAULT_FILE"]).with_name("steps").write_text(f"{step} {trainer.global_step}")


class Vectors(Dataset[Tensor]):
    def __init__(self, fault: Fault, num_batches: int) -> None:
        self.fault, self.num_batches = fault, num_batches

    def __len__(self) -> int:
        return BATCH * self.num_batches

    def __getitem__(self, index: int) -> Tensor:
        if index == BATCH * STEP:
            self.fault.at("loader")
        return torch.full((WIDTH,), index / 48.0)


def strategy_of(layout: str) -> Any:
    """The strategy; all end waiting after `TIMEOUT`."""
    if layout == "ddp":
        from lightning.pytorch.strategies import DDPStrategy

        return DDPStrategy(timeout=TIMEOUT)
    if layout == "model_parallel":
        from lightning.pytorch.strategies import ModelParallelStrategy

        return ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1, timeout=TIMEOUT)
    from lightning_hanayo import HanayoStrategy

    return HanayoStrategy(**LAYOUTS[layout], num_microbatches=4, timeout=TIMEOUT)


def main(layout: str, fault: Fault, folder: Path) -> None:
    """Train twelve steps in one process, with the fault."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
    with open(os.environ["START_FILE"], "a") as file:
        file.write(f"{os.getpid()}\n")
    fault.at("import")
    saves = ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVE_EVERY, save_last=True)
    trainer = Trainer(
        accelerator="cpu", devices=4, strategy=strategy_of(layout), max_epochs=2, logger=False, callbacks=[saves],
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False, num_sanity_val_steps=0,
        default_root_dir=folder,
    )  # fmt: skip
    torch.manual_seed(0)
    training, validation = (DataLoader(Vectors(fault, 6), BATCH), DataLoader(Vectors(Fault("none", "", 0), 2), BATCH))
    trainer.fit(Model(fault, layout == "model_parallel"), training, validation)
    fault.at("after fit")
    print("finished")


if __name__ == "__main__":
    layout, kind, site, rank, folder = sys.argv[1:]
    main(layout, Fault(kind, site, int(rank)), Path(folder))  # type: ignore[arg-type]

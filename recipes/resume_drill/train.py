"""The training of the drill, a script as a user would write it:  python -m recipes.resume_drill.train FOLDER STEPS

A small GPT with dropout on two pipelines of two ranks. It saves in the background every few steps, and starts from
`last.ckpt` if there is one. Besides, it writes down what the drill looks at: the processes' ids, each step, each batch.
"""

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from zlib import crc32

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from lightning_hanayo import HanayoStrategy
from recipes.gpt.module import GPT
from recipes.resume_drill.data import CONTEXT, VOCABULARY, DrillData

PIPE, DATA, SAVE_EVERY = 2, 2, 5
CHECKPOINTS, PIDS, STEPS, BATCHES = "checkpoints", "pids", "steps", "batches"
"""what is in the folder"""


class Notes(Callback):
    """Writes down each step and, on ranks that read data, a hash of each batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: L.Trainer, _: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Note the batch of the step that comes."""
        if getattr(trainer.strategy, "pipe_rank", 0) == 0:
            kwargs = trainer.distributed_sampler_kwargs or {"rank": 0}
            content = crc32(batch["input_ids"].numpy().tobytes())
            self._add(f"{BATCHES}-{kwargs['rank']}", f"{trainer.global_step} {content}")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Note that a step was made."""
        if trainer.is_global_zero:
            self._add(STEPS, f"{trainer.global_step} {time.time():.3f}")

    def _add(self, name: str, line: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(line + "\n")


def main(folder: Path, num_steps: int) -> None:
    """Train in one process."""
    warnings.filterwarnings("ignore", message=".*exists and is not empty|.*no last checkpoint available|.*LeafSpec")
    rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
    (folder / PIDS / rank).write_text(str(os.getpid()))
    L.seed_everything(1, verbose=False)
    saves = ModelCheckpoint(folder / CHECKPOINTS, save_top_k=0, save_last=True, every_n_train_steps=SAVE_EVERY)
    strategy = HanayoStrategy(
        pipeline_parallel_size=PIPE, data_parallel_size=DATA, num_microbatches=4, save_async=True
    )  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu", devices=PIPE * DATA, strategy=strategy, max_steps=num_steps, logger=False,
        default_root_dir=folder, callbacks=[saves, Notes(folder)], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    module = GPT(VOCABULARY, CONTEXT, num_layers=4, width=32, num_heads=2, dropout=0.1)
    trainer.fit(module, DrillData(), ckpt_path="last")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""A training script for two agents of torchrun with two processes each:  agents_script.py

Each process writes its rank and process id to the folder STARTED once it trains; it trains for minutes.
"""

import os
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_hanayo import HanayoStrategy
from tests.harness import models
from tests.harness.limits import stretch_grace
from tests.harness.training import make_loader


class Slow(models.MLP):
    """Takes its time, so that it can be disturbed."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            file = Path(os.environ["STARTED"]) / os.environ["RANK"]
            file.with_suffix(".partial").write_text(str(os.getpid()))
            file.with_suffix(".partial").rename(file)
        time.sleep(0.1)


def main() -> None:
    """Train in one process."""
    stretch_grace()
    strategy = HanayoStrategy(pipeline_parallel_size=2, data_parallel_size=2, num_microbatches=2)
    trainer = Trainer(
        accelerator="cpu", devices=2, num_nodes=2, strategy=strategy, max_epochs=-1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(Slow(), make_loader(models.vectors((8,) * 1000)))


if __name__ == "__main__":
    main()

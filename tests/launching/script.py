"""A training script for any launcher:  script.py NODES DEVICES WEIGHTS

Rank 0 writes the weights after the training to the file WEIGHTS, all ranks their places to its folder.
"""

import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import Trainer

from lightning_hanayo import HanayoStrategy
from tests.harness import models
from tests.harness.limits import stretch_grace
from tests.harness.training import make_loader

BATCHES = (8, 8, 8)


def main(num_nodes: int, devices: int, weights: Path) -> None:
    """Train in one process: alone if there is one, else on pipelines of two ranks."""
    stretch_grace()
    world_size = num_nodes * devices
    strategy = HanayoStrategy(2, data_parallel_size=world_size // 2, num_microbatches=4) if world_size > 1 else "auto"
    trainer = Trainer(
        accelerator="cpu", devices=devices, num_nodes=num_nodes, strategy=strategy, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    module = models.build(models.MLP, torch.float64)
    num_data = max(1, world_size // 2)
    data_rank = trainer.global_rank // 2
    batches = [{name: value[data_rank::num_data] for name, value in batch.items()} for batch in models.vectors(BATCHES)]
    for batch in batches:
        batch["x"] = batch["x"].double()
    trainer.fit(module, make_loader(batches))
    (weights.parent / f"rank-{trainer.global_rank}").write_text(f"{trainer.node_rank} {trainer.local_rank}")
    whole = module if world_size == 1 else trainer.strategy.gather_model()  # type: ignore[attr-defined]
    if trainer.is_global_zero:
        torch.save(dict(whole.state_dict()), weights)
    print(f"rank {trainer.global_rank} of {world_size} is done, in process {os.getpid()}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

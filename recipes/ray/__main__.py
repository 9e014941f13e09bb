"""Trains a small GPT on four workers of a local Ray cluster:  python -m recipes.ray [--workers N] [--steps N]

The cluster is started and stopped here. On a cluster that runs, set RAY_ADDRESS; `default_root_dir` and the caches must
then be on storage that all nodes see.
"""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import ray
from ray.train import Result, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from recipes.ray.train import train


def run(config: dict[str, Any], folder: Path, *, use_gpu: bool = False) -> Result:
    """Train `config` (see `train`) on as many workers as it says, with Ray's results in `folder`."""
    trainer = TorchTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=config["workers"], use_gpu=use_gpu),
        torch_config=None if use_gpu else TorchConfig(backend="gloo"),
        run_config=RunConfig(name="gpt", storage_path=str(folder.absolute())),
    )
    return trainer.fit()


def main() -> None:
    """Parse the options and train."""
    parser = ArgumentParser("python -m recipes.ray", description="Train a small GPT with Ray Train.")
    parser.add_argument("--workers", type=int, default=4, help="a multiple of 2 (default: 4)")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps (default: 60)")
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    options = parser.parse_args()
    folder = Path("runs/ray").absolute()
    config = {
        "workers": options.workers,
        "strategy": {"pipeline_parallel_size": 2, "num_waves": 2, "data_parallel_size": "auto", "num_microbatches": 4},
        "model": {"learning_rate": 1.5e-3, "warmup_steps": 15},
        "data": {"batch_size": 8, "cache_dir": str(folder / "cache")},
        "trainer": {"max_steps": options.steps, "limit_val_batches": 0, "default_root_dir": str(folder)},
    }
    ray.init(num_cpus=options.workers, include_dashboard=False)
    try:
        result = run(config, folder, use_gpu=options.gpus)
        print(
            f"train_loss {result.metrics['train_loss']:.3f} after {options.steps} steps; weights: {result.checkpoint}"
        )
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()

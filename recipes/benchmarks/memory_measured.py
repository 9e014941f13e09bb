"""Measures the most memory that ranks hold in a training step: ours, DDP and FSDP2, over gloo."""

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from recipes.benchmarks.harness import ORDINARY, run_ranks

STEPS = 3
"""the third one is measured"""
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sizes:
    """Of a model, and of the batch of one data rank."""

    model: str
    """gpt or llama"""
    width: int
    context: int
    """tokens of a sequence"""
    blocks: int = 8
    words: int = 1024
    samples: int = 16

    @property
    def heads(self) -> int:
        """One for every 32 features."""
        return max(1, self.width // 32)


def world_size(layout: Mapping[str, Any]) -> int:
    """How many ranks it takes."""
    sizes = (layout.get("pipeline_parallel_size", 1), layout.get("data_parallel_size", 1))
    return prod((*sizes, *layout.get("cube", ())))


def run_ours(sizes: Sizes, layout: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What each rank of a layout held, and was predicted to hold: the fields of a `RankReport`."""
    ranks: list[dict[str, Any]] = _run(world_size(layout), partial(_fit_ours, sizes=sizes, layout=layout))[0]
    return ranks


def run_peer(sizes: Sizes, system: str, num_ranks: int) -> int:
    """The most bytes that a rank holds with "DDP" or "FSDP2"."""
    peaks: list[int] = _run(num_ranks, partial(_fit_peer, sizes=sizes, system=system))
    return max(peaks)


def _run(num_ranks: int, work: Any) -> list[Any]:
    return [result for _, result in run_ranks(work, num_ranks, [ORDINARY] * num_ranks, TIMEOUT_S)]


def _fit_ours(rank: int, num_ranks: int, *, sizes: Sizes, layout: Mapping[str, Any]) -> list[dict[str, Any]]:
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from lightning_hanayo import HanayoStrategy
    from recipes.benchmarks.memory_models import make_model

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*(does not have many workers|no `val_dataloader`|LeafSpec)")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "NODE_RANK": "0"}
    torch.manual_seed(0)
    tokens = torch.randint(sizes.words, (STEPS, sizes.samples, sizes.context + 1))
    batches: list[Any] = [{"input_ids": one[:, :-1].clone(), "labels": one[:, 1:].clone()} for one in tokens]
    strategy = HanayoStrategy(measure_memory=True, **layout)
    trainer = L.Trainer(
        accelerator="cpu", devices=num_ranks, strategy=strategy, max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(make_model(sizes), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    names: Sequence[str] = ("predicted", "predicted_peak", "measured_peak", "error", "process")
    return [{name: getattr(one, name) for name in names} for one in strategy.memory_report().ranks]


def _fit_peer(_: int, num_ranks: int, *, sizes: Sizes, system: str) -> int:
    import torch

    from recipes.benchmarks.memory_models import make_model
    from recipes.benchmarks.resized_bytes import ResizedBytes

    torch.manual_seed(0)
    live = ResizedBytes()
    with live.counting():
        model = _parallelize(make_model(sizes), system, num_ranks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
        for _ in range(STEPS):
            tokens = torch.randint(sizes.words, (sizes.samples, sizes.context))
            live.restart()
            model({"input_ids": tokens, "labels": tokens}, 0).backward()
            optimizer.step()
            optimizer.zero_grad()
        return live.peak


def _parallelize(model: Any, system: str, num_ranks: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model.forward = model.training_step
    if system == "DDP":
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    mesh = init_device_mesh("cpu", (num_ranks,))
    for part in (*model.net.model.layers, model):
        fully_shard(part, mesh=mesh)
    return model

"""Says in one line what a run does with its ranks, its samples and their memory.

ddp on 4 devices         4 batches of the loader in each step
a pipeline of 4 ranks    1 batch
"""

from typing import Any

import lightning.pytorch as pl
from torch import nn

from lightning_hanayo.partition.ownership import Ownership
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.topology import Topology


def describe_run(trainer: "pl.Trainer", layout: Layout, ownership: Ownership, topology: Topology, fullest: int) -> str:
    """One line for the user, at the start of a training whose model is cut.

    Args:
        trainer: whose training loader is known.
        layout: of the pipeline.
        ownership: which stage has which blocks.
        topology: of all ranks.
        fullest: bytes of weights and gradients on the rank that holds the most.
    """
    stack, cube = ownership.stack, "x".join(map(str, topology.cube))
    parts = f"{layout.num_stages} stages on {topology.pipe} pipeline rank{'s' * (topology.pipe > 1)}"
    parts += f" in a {cube} cube" if topology.cube != (1, 1, 1) else ""
    waves = f", {layout.num_waves} wave{'s' * (layout.num_waves > 1)}" if layout.num_waves else ""
    return (
        f"{stack.name}: {len(stack)} blocks, {parts}, x {topology.data} data = {topology.world_size} ranks. "
        f"Schedule {layout.schedule}{waves}, {layout.num_microbatches} micro-batches, predicted bubble "
        f"{layout.predict():.0%}. {_samples(trainer, topology)} Learning rates scale with "
        f"trainer.strategy.data_parallel_size ({topology.data}), not trainer.world_size. Weights and gradients: "
        f"{_size(fullest)} on the fullest rank."
    )


def held_bytes(module: nn.Module) -> int:
    """Bytes of this rank's parameters and of the gradients that they will have."""
    own = [one for one in module.parameters() if not one.is_meta]
    return sum(one.numel() * one.element_size() * (1 + one.requires_grad) for one in own)


def samples_per_rank(trainer: "pl.Trainer") -> int | None:
    """How many samples of each data rank make an optimizer step, where the loader tells."""
    loader: Any = trainer.train_dataloader
    batch = getattr(loader, "batch_size", None)
    return batch * trainer.accumulate_grad_batches if isinstance(batch, int) else None


def _samples(trainer: "pl.Trainer", topology: Topology) -> str:
    of_rank, accumulated, data = samples_per_rank(trainer), trainer.accumulate_grad_batches, topology.data
    if of_rank is None:
        per_step = accumulated * data
        count = "one batch" if per_step == 1 else f"{per_step} batches"
        return f"A step takes {count} of the loader; ddp would take {accumulated * topology.world_size}."
    return (
        f"A step takes {of_rank * data} samples, {of_rank} for each data rank; ddp would take "
        f"{of_rank * topology.world_size}."
    )


def _size(num_bytes: int) -> str:
    """As people write it: 0.3 MB, 12.5 GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"

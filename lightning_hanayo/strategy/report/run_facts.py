"""What loggers get to know about a run once: layout, sizes, samples, seed, and at its end the memory it took."""

import os
from typing import Any

import lightning.pytorch as pl

from lightning_hanayo.runtime.comm.object_collectives import gather_objects
from lightning_hanayo.strategy.lightning.inspection.model_summary import whole_on_meta
from lightning_hanayo.strategy.lightning.inspection.start import samples_per_rank
from lightning_hanayo.strategy.memory.process import peak_bytes
from lightning_hanayo.strategy.strategy import HanayoStrategy


def run_facts(trainer: "pl.Trainer", module: "pl.LightningModule", strategy: HanayoStrategy) -> dict[str, Any]:
    """The facts known when a training starts, by the names under which they are logged. For rank 0."""
    layout, topology, ownership = strategy.pipeline.layout, strategy.topology, strategy.pipeline.ownership
    cube = f" x {'x'.join(map(str, topology.cube))} cube" if topology.cube != (1, 1, 1) else ""
    stages = [f"{run.start}-{run.stop - 1}" if len(run) > 1 else str(run.start) for run in ownership.stages if run]
    parameters = list(whole_on_meta(module).parameters())
    facts = {
        "layout": f"{topology.pipe} pipeline{cube} x {topology.data} data = {topology.world_size} ranks",
        "schedule_name": layout.schedule,
        "num_waves": layout.num_waves,
        "num_microbatches": layout.num_microbatches,
        "stack": f"{ownership.stack.name}: {len(ownership.stack)} blocks, stages {' | '.join(stages)}",
        "predicted_bubble": round(layout.predict(), 4),
        "parameters": sum(one.numel() for one in parameters),
        "trained_parameters": sum(one.numel() for one in parameters if one.requires_grad),
        "weights_and_gradients_bytes": strategy.session.held_bytes,
    }
    of_rank, seed = samples_per_rank(trainer), os.environ.get("PL_GLOBAL_SEED")
    if of_rank is not None:
        facts["samples_per_step"] = of_rank * topology.data
    if seed is not None:
        facts["seed"] = int(seed)
    return {f"hanayo/{name}": value for name, value in facts.items()}


def peak_memory(strategy: HanayoStrategy) -> dict[int, int]:
    """The most bytes that each rank of the first replica has had so far, by rank.

    On an accelerator what torch has allocated there; on CPUs the memory of the process. Called by all ranks of the
    replica; rank 0 gets the values.
    """
    own = peak_bytes(strategy.root_device)
    if strategy.topology.replica_size == 1:
        return {0: own}
    peaks = gather_objects(strategy.groups.replica, own)
    return dict(zip(strategy.groups.replica_ranks, peaks, strict=False))

"""Lets Lightning's `ThroughputMonitor` count a batch once, although several ranks work on it."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ThroughputMonitor

from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of
from lightning_hanayo.topology import Topology


def count_batches_once(trainer: "pl.Trainer", topology: Topology) -> None:
    """Let totals be over data ranks, and a "device" be all ranks that hold one copy of the model.

    Lightning multiplies what rank 0 has seen by the number of ranks, but only the data ranks see different batches.
    """
    for callback in callbacks_of(trainer):
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                throughput.world_size = topology.data
                if callback.available_flops is not None:
                    throughput.available_flops = callback.available_flops * topology.replica_size

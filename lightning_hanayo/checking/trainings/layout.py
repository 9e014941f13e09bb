"""Trains on the layout: one rank of it, and what all ranks together have left."""

import os
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from lightning_hanayo.checking.case import Case, RankResult, Stage
from lightning_hanayo.checking.comparison import Values
from lightning_hanayo.checking.trainings.observer import Observer
from lightning_hanayo.checking.trainings.prepare import prepare
from lightning_hanayo.checking.trainings.rank import make_loader, make_trainer, rank_of_run
from lightning_hanayo.strategy import HanayoStrategy
from lightning_hanayo.topology import Topology

_OF_ALL_DATA_RANKS = ("gradient", "weight")
"""what the data ranks must agree on; losses have their number in their name, buffers and logs are data rank 0's"""


@rank_of_run
def run_rank(case: Case) -> RankResult:
    """Train as the rank that the environment names. Called by all ranks of the case's topology."""
    topology = case.topology
    data_rank, pipe_rank, *cube = topology.coordinates(int(os.environ["RANK"]))
    is_first = not any((pipe_rank, *cube))
    module = prepare(case, whole=False)
    accumulate = case.trainer.accumulate_grad_batches
    observer = Observer(
        # Lightning has divided the loss by the number of batches.
        lambda outputs: {data_rank: outputs["loss"] * accumulate} if is_first else {},
        accumulate,
        topology.data,
        logs=is_first,
    )
    strategy = make_strategy(case)
    trainer = make_trainer(case, observer, devices=topology.world_size, strategy=strategy)
    trainer.fit(module, make_loader(case, data_rank))
    pipeline = strategy.pipeline
    stages = tuple(map(Stage, pipeline.ownership.stages, pipeline.ownership.stage_ranks))
    return RankResult(
        observer.values,
        stack=pipeline.ownership.stack.name,
        stages=stages,
        num_microbatches=pipeline.layout.num_microbatches,
    )


def make_strategy(case: Case) -> HanayoStrategy:
    """A new strategy with the case's options, on the case's ranks."""
    options: dict[str, Any] = {field.name: getattr(case.options, field.name) for field in fields(case.options)}
    topology = case.topology
    sizes = {"pipeline_parallel_size": topology.pipe, "data_parallel_size": topology.data, "cube": topology.cube}
    return HanayoStrategy(**options | sizes)


def merge(ranks: Sequence[RankResult], topology: Topology) -> list[Values]:
    """The values of each data rank, merged over its pipeline ranks. All ranks of a cube have the same: the first's.

    A value that several pipeline ranks have, such as a buffer outside the stack, is the first one's, which runs it.
    """
    merged: list[Values] = []
    for replica in topology.groups("pipe", "x", "y", "z"):
        owners = [rank for rank in replica if not any(topology.coordinates(rank)[2:])]
        values: Values = {}
        for rank in reversed(owners):
            values |= ranks[rank].values
        merged.append(values)
    for other in merged[1:]:
        merged[0].update({key: value for key, value in other.items() if key.kind == "loss"})
    return [merged[0], *({k: v for k, v in other.items() if k.kind in _OF_ALL_DATA_RANKS} for other in merged[1:])]

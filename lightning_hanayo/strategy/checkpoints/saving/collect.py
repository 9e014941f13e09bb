"""Collects what each rank writes of a checkpoint: its tensors, and on rank 0 the documents.

hooks      Lightning asks each rank for its state, and hooks change it
collect    each rank sorts what it holds, and tells the others what they can't know: values that are no tensors
document   rank 0 puts those and its own together
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_hanayo.checkpoint.format.plain_values import DistributedTensor
from lightning_hanayo.checkpoint.format.state_document import STATE
from lightning_hanayo.checkpoint.save.part import RankPart
from lightning_hanayo.strategy.checkpoints.resume import KEY, ResumeState
from lightning_hanayo.strategy.checkpoints.resume_storage import run_entry, with_resume
from lightning_hanayo.strategy.checkpoints.saving.distributed_tensors import value_at
from lightning_hanayo.strategy.checkpoints.saving.document import MODEL, OPTIMIZERS, about, state_document
from lightning_hanayo.strategy.checkpoints.saving.own_state import names_of, parameters_of
from lightning_hanayo.strategy.checkpoints.saving.parts import OwnValues, Place, RankTensors, first_with, tied_names
from lightning_hanayo.strategy.groups.on_all_ranks import on_all_ranks, with_common_errors
from lightning_hanayo.strategy.lightning.optimizers import unwrapped
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.setup.cube import Cube


@dataclass(frozen=True)
class CutModel:
    """A module that is cut into stages, and what trains it."""

    module: "pl.LightningModule"
    pipeline: Pipeline
    cube: Cube | None
    shards: OptimizerShards | None
    optimizers: Sequence[Optimizer]
    names: Mapping[Tensor, str]
    """of the parameters, also of those that only the optimizers have"""


def rank_part(
    checkpoint: Mapping[str, Any], model: CutModel, place: Place, resume: ResumeState | None = None
) -> RankPart:
    """What this rank writes of a checkpoint. Called by all ranks of the world.

    Args:
        checkpoint: Lightning's, as hooks have left it, with the state dicts of `own_state`.
        model: whose parameters are not guarded.
        place: this rank's.
        resume: what this rank adds for a run that goes on from the checkpoint.

    Raises:
        UnsupportedError: on all ranks, if one has something that can't be stored.
    """
    module = model.module
    checkpoint = checkpoint if resume is None else {**checkpoint, KEY: run_entry(resume)}
    listed = [(one, names_of(parameters_of(one), model.names)) for one in map(unwrapped, model.optimizers)]
    tied = tied_names(module, checkpoint[MODEL])
    parameters = {name: p for p, name in model.names.items()} | dict(module.named_parameters(remove_duplicate=False))
    tensors = RankTensors(parameters, model.pipeline.ownership.rank_by_name(module), place)

    def collect() -> OwnValues:
        tensors.add_module(checkpoint[MODEL], tied)
        for index, ((one, found), state) in enumerate(zip(listed, checkpoint.get(OPTIMIZERS, ()), strict=False)):
            by_name = dict(zip(found, parameters_of(one), strict=True))
            tensors.add_optimizer(index, by_name, state.get("state", {}))
        return tensors.values

    gathered = on_all_ranks(collect)
    tensors.add_new(first_with([own.added for own in gathered]))
    texts: dict[str, Any] = {}

    def write_document() -> dict[int, DistributedTensor]:
        if place.rank > 0:
            return {}
        document = state_document(checkpoint, tied, listed, gathered)
        texts[STATE], found = document.encode()
        for number, one in enumerate(found):
            if isinstance(one, Tensor):
                tensors.add_state(number, one)
        return {number: one for number, one in enumerate(found) if isinstance(one, DistributedTensor)}

    distributed = on_all_ranks(write_document)[0]

    def add_distributed() -> None:
        for number, one in distributed.items():
            tensors.add_distributed(number, one, value_at(checkpoint, one.path))

    if distributed:
        with_common_errors(add_distributed)
    facts = {}
    if place.rank == 0:
        facts = about(checkpoint, module, place.cube, place.topology, model.pipeline.layout, tied)
    part = RankPart(tensors.parts, texts, facts)
    return part if resume is None else with_common_errors(lambda: with_resume(part, resume, place.data_rank))

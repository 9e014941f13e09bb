"""Gives the optimizers of a run the states of a checkpoint: checked on all ranks, then each rank reads its part."""

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_hanayo.checkpoint.load.optimizer_state import OptimizerState
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.strategy.checkpoints.load import Checkpoint
from lightning_hanayo.strategy.groups.on_all_ranks import with_common_errors
from lightning_hanayo.strategy.lightning.optimizers import unwrapped
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.strategy.setup.optimizers import is_elementwise


def load_optimizers(
    module: "pl.LightningModule",
    optimizers: Sequence[Optimizer],
    checkpoint: Mapping[str, Any],
    names: Mapping[Tensor, str],
    sharding: Cube | OptimizerShards | None,
    options: Options,
) -> None:
    """Load all optimizers' states, by the `names` of their parameters. Called by all ranks of the world.

    Raises:
        CheckpointError: on all ranks, before any state changes: they are another optimizer's, of other parameters, or
            missing.
    """
    source, states = Checkpoint.source_of(checkpoint), checkpoint["optimizer_states"]
    if len(states) != len(optimizers):
        raise CheckpointError(
            f"{source} has the states of {len(states)} optimizers, this {type(module).__name__} has {len(optimizers)}. "
            f"Configure the same ones, or load its weights alone, with init_from or in configure_model."
        )
    shapes: Mapping[Tensor, tuple[int, ...]] = {} if sharding is None else sharding.whole_shapes
    checked = [
        OptimizerState(
            unwrapped(optimizer),
            state,
            names,
            source,
            accept=options.load_anyway,
            shapes=shapes,
            elementwise=is_elementwise(optimizer),
        )
        for optimizer, state in zip(optimizers, states, strict=True)
    ]
    for line in (line for one in checked for line in one.warnings):
        rank_zero_warn(line)
    for one in checked:
        with_common_errors(lambda one=one: one.load(sharding))  # type: ignore[misc]

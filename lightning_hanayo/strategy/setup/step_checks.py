"""Makes what all ranks look at together around optimizer steps: norms, values that aren't finite, and copies."""

from collections.abc import Mapping
from functools import partial

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.errors import available
from lightning_hanayo.strategy import norms
from lightning_hanayo.strategy.lightning import state
from lightning_hanayo.strategy.nonfinite import BlockNames, NonFiniteCheck, RankNames
from lightning_hanayo.strategy.norms import GradientNorms
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.strategy.votes import ReplicaCheck


def gradient_norms(
    run: Run, module: "pl.LightningModule", cube: Cube | None, shards: OptimizerShards | None
) -> GradientNorms:
    """Norms over the whole model's gradients, which torch's functions for norms and clipping take from now on."""
    num_replicas = None if cube is None else cube.num_replicas
    several, scatters = run.topology.replica_size > 1, shards is not None and shards.scatters
    groups = (run.groups.replica, run.groups.replica_tensors) if several else None
    own_part = None
    if shards is not None and scatters:
        own_part = shards.own_rows
        world = run.groups.factory.control(run.topology.groups("data", "pipe", "x", "y", "z"))
        groups, num_replicas = (world, available(dist.group.WORLD, "several ranks")), shards.num_replicas
    made = GradientNorms(
        list(module.parameters()),
        groups,
        num_replicas=num_replicas,
        own_part=own_part,
        relay=run.replica_relay,
        device=run.device,
        unguarded=run.guard.off,
    )
    if several or scatters:
        norms.start(made)
        run.parts.add(lambda: norms.stop(made))
    run.parts.add(made.close)
    return made


def gradient_check(
    run: Run, trainer: "pl.Trainer", pipeline: Pipeline, names: Mapping[Tensor, str], over: GradientNorms
) -> NonFiniteCheck:
    """The check that no optimizer steps with gradients that aren't finite; called before each step from now on."""
    blocks = BlockNames(pipeline.ownership.stack.block_names, pipeline.ownership.stages)
    check = NonFiniteCheck(
        run.options.nonfinite,
        RankNames(run.rank, run.topology.place, blocks),
        run.values,
        own_parameters(pipeline, names),
        over,
        run.groups,
        num_steps=lambda: trainer.global_step,
        is_search=partial(state.searches_rate, trainer),
    )
    plugin = trainer.precision_plugin
    state.call_before_steps(plugin, run.attributes, check.before_step, on_unscaled=check.after_unscaling)
    run.parts.add(check.close)
    return check


def replica_check(run: Run, module: nn.Module, cube: Cube | None, pipeline: Pipeline) -> ReplicaCheck:
    """The comparison of parameters that several ranks hold."""
    ownership = pipeline.ownership
    among = (run.groups.data_control, None if run.groups.cube is None else run.groups.cube.whole)
    return ReplicaCheck(
        run.options.check_replicas,
        {
            (name, "" if cube is None else str(cube.region(parameter))): parameter
            for name, parameter in module.named_parameters()
            if not parameter.is_meta
        },
        [group for group in among if group is not None],
        BlockNames(ownership.stack.block_names, ownership.stages).stage_of,
        run.topology.place,
    )


def own_parameters(pipeline: Pipeline, names: Mapping[Tensor, str]) -> dict[str, nn.Parameter]:
    """The parameters that this rank trains, by name."""
    return {names[parameter]: parameter for parameter in pipeline.parameters if parameter in names}

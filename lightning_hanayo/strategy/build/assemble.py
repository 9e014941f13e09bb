"""The assembly: how a whole model becomes what one rank holds of it, by layout, stack and cube."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
from torch import nn

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.partition.deferred_init import DeferredInit, is_unbuilt
from lightning_hanayo.partition.cut import cut
from lightning_hanayo.partition.ownership import Ownership, Placeholder, leave_out, outside_modules
from lightning_hanayo.partition.block_times import profile
from lightning_hanayo.partition.stack import Stack, find_stack, num_outside
from lightning_hanayo.planner.layout import Layout, choose
from lightning_hanayo.runtime.comm.relay import Relay
from lightning_hanayo.runtime.comm.process_group import OnFailure, ProcessGroupTransport
from lightning_hanayo.runtime.random_streams import RandomStreams
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes
from lightning_hanayo.strategy.build.connect import connect
from lightning_hanayo.strategy.build.cube import Cube
from lightning_hanayo.strategy.build.process_groups import ProcessGroups
from lightning_hanayo.strategy.build.initial_values import give_values
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.tensor3d.convert.parallelize import ParallelizePlan, plan_swap
from lightning_hanayo.topology import Topology


@dataclass
class Prepared:
    """What is kept of a module that has been set up once: another run finds its stages cut and its layers swapped."""

    runs: list[range] | None = None
    """the blocks of each stage"""
    cube: Cube | None = None
    """None before setup, or without a cube"""


def layout_of(model: nn.Module, options: Options, topology: Topology, *, steady: bool) -> tuple[Stack, Layout]:
    """The model's stack and the layout it gets. Needs no process group: what is wrong is known before any starts.

    `steady` says whether nothing makes ranks wait for each other between steps.

    Raises:
        HanayoError: no stack, or too few blocks.
    """
    in_cube = prod(topology.cube) > 1
    stack = find_stack(model, options.blocks)
    layout = choose(
        num_ranks=topology.pipe,
        num_blocks=len(stack),
        num_waves=options.num_waves,
        num_microbatches=options.num_microbatches,
        schedule=options.schedule,
        activation_budget=options.activation_budget,
        costs=options.costs,
        steady=steady,
        apart=in_cube,
    )
    if not isinstance(options.balance, str) and len(options.balance) != len(stack):
        raise HanayoError(f"balance has {len(options.balance)} costs, but {stack.name} has {len(stack)} blocks")
    return stack, layout


def plan_cube(model: nn.Module, stack: Stack, options: Options, topology: Topology) -> ParallelizePlan | None:
    """What becomes of the blocks in a cube; None without one. As `layout_of`, before any process starts.

    Raises:
        HanayoError: a size of theirs doesn't divide over the cube.
    """
    if prod(topology.cube) == 1:
        return None
    outside = {p for module in outside_modules(model, stack) for p in module.parameters(recurse=False)}
    return plan_swap(stack.blocks, stack.name, topology.cube, tokens=options.cube_tokens, outside=outside)


def assemble(
    model: nn.Module,
    stack: Stack,
    layout: Layout,
    options: Options,
    groups: ProcessGroups,
    *,
    device: torch.device,
    example: Callable[[], object] | None,
    runs: list[range] | None,
    cube: Cube | None,
    seed: int,
    streams: RandomStreams | None,
    chain: Relay,
    changes: TemporaryAttributes,
    on_failure: OnFailure,
) -> Pipeline:
    """Cut `model` into this rank's stages and connect them. Called by all ranks of the world.

    Args:
        model: the whole model, the same on all ranks; afterwards other ranks' parameters are placeholders.
        stack: its blocks.
        layout: what they become.
        options: as `HanayoStrategy` got them.
        groups: this rank's process groups.
        device: where the model shall lie.
        example: runs the model once, for `balance="time"`.
        runs: the blocks of each stage, if they were cut before.
        cube: the ranks that hold each stage together; None for one.
        seed: of the values of what was built on the meta device.
        streams: where random numbers come from; None: from torch's own generators as they are.
        changes: remembers what is set on the model's modules for the run.
        chain: over the ranks of the pipeline.
        on_failure: what to do when a transfer fails.
    """
    table = layout.table(layout.num_microbatches)
    runs = runs or cut_stack(model, stack, layout, options, example)
    ownership = Ownership(stack, (*runs, *([range(0)] if table.loss_stage else [])), table.stage_ranks)
    transport = ProcessGroupTransport(
        groups.pipe_ranks, control=groups.control, channels=groups.channels, device=device, on_failure=on_failure
    )
    blueprint = DeferredInit(model, seed) if is_unbuilt(model) else None
    own = keep_own(model, ownership, transport.rank)
    move(model, device)
    if cube is not None:
        _spread(model, ownership, transport.rank, own, cube)
    if blueprint is not None:
        give_values(blueprint, _own_modules(model, ownership, transport.rank), device, cube)
    return connect(model, layout, ownership, transport, own, groups, cube, streams, chain, changes)


def _spread(model: nn.Module, ownership: Ownership, rank: int, own: list[nn.Parameter], cube: Cube) -> None:
    """Let the ranks of the cube hold this rank's stages together."""
    blocks = {stage: ownership.blocks(stage) for stage in ownership.stages_of(rank)}
    cube.spread(blocks, own, outside_modules(model, ownership.stack))


def _own_modules(model: nn.Module, ownership: Ownership, rank: int) -> list[nn.Module]:
    """Those of this rank's blocks, and those outside the stack on the rank that plays stage 0."""
    stages = ownership.stages_of(rank)
    outside = outside_modules(model, ownership.stack) if 0 in stages else []
    return [*outside, *(part for stage in stages for block in ownership.blocks(stage) for part in block.modules())]


def cut_stack(
    model: nn.Module, stack: Stack, layout: Layout, options: Options, example: Callable[[], object] | None
) -> list[range]:
    """The blocks of each stage, the same on all ranks."""
    if options.balance == "parameters":
        blocks = [float(sum(p.numel() for p in block.parameters())) for block in stack.blocks]
        return _cut(blocks, layout, num_outside(model, stack))
    if options.balance != "time":
        return cut([float(cost) for cost in options.balance], layout.num_stages)
    if is_unbuilt(model):
        raise HanayoError("balance='time' runs the model once, but it was built on the meta device; use 'parameters'")
    if example is None:
        raise HanayoError("balance='time' runs the model once on `example_input_array`; the LightningModule has none")
    costs, outside = profile(model, stack, example)
    measured = torch.tensor([*costs, outside], dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(measured, src=0)  # every rank measures, one counts
    *costs, outside = measured.tolist()
    return _cut(costs, layout, outside)


def _cut(costs: Sequence[float], layout: Layout, outside: float) -> list[range]:
    """Code outside the stack runs on rank 0, whose blocks are the last stage's in a wave, the first one's in a loop."""
    if layout.ends_on_first_rank:
        return cut(costs, layout.num_stages, last=outside)
    return cut(costs, layout.num_stages, first=outside)


def keep_own(model: nn.Module, ownership: Ownership, rank: int) -> list[nn.Parameter]:
    """Leave out what other pipeline ranks own; return what this one trains, in the model's order."""
    ownership.check(model)
    kept = {p for stage in ownership.stages_of(rank) for p in ownership.stage_parameters(model, stage)}
    own = set(_own_modules(model, ownership, rank))  # blocks may share a module without parameters
    others = (part for block in ownership.stack.blocks for part in block.modules())
    leave_out(model, kept, elsewhere=[part for part in others if part not in own])
    parameters = model.named_parameters()
    missing = [name for name, parameter in parameters if parameter in kept and isinstance(parameter, Placeholder)]
    if missing:
        raise UnsupportedError(
            f"{missing[0]} has no values here: the model was trained before, on another layout, and lies on its ranks. "
            f"Build it anew, and load a checkpoint."
        )
    return [parameter for parameter in model.parameters() if parameter in kept]


def move(model: nn.Module, device: torch.device) -> None:
    """Move what this rank holds to `device`; placeholders stay where they are."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def tensors_of(model: nn.Module) -> Sequence[torch.Tensor]:
    """All values of a model that is whole: what the ranks must agree on."""
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]

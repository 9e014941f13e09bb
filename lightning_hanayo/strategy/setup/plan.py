"""Decides what becomes of a model, before any process starts: its stack, the pipeline's layout, its 3-D layers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import floor, prod

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.module_hooks import check_hooks, check_parameter_hooks
from lightning_hanayo.partition.ownership import Ownership
from lightning_hanayo.partition.stack import (
    Stack,
    describe_uncut,
    find_stack,
    find_stack_if_any,
    modules_outside,
    other_lists,
)
from lightning_hanayo.pipeline_parallel.graph_boundary import attention_of
from lightning_hanayo.planner.layout import RECOMPUTING, Layout, TooFewBlocks, choose
from lightning_hanayo.schedule.registry import AUTO
from lightning_hanayo.strategy.lightning import user_hooks
from lightning_hanayo.strategy.options import Options, Recompute
from lightning_hanayo.strategy.setup import checks
from lightning_hanayo.strategy.setup.prepared_model import PreparedModel
from lightning_hanayo.strategy.setup.values import FolderPlan, plan_pretrained, was_read
from lightning_hanayo.tensor_parallel.convert.parallelize import ParallelizePlan, plan_parallelize
from lightning_hanayo.topology import Topology

_WHOLE_BACKWARD = "hanayo"
"""what "auto" is where blocks are recomputed: in a backward of two parts the queue of weight gradients keeps, from the
first part to the second, all that a block has recomputed, which takes as much memory as not to recompute"""


@dataclass(frozen=True)
class ModelPlan:
    """The stack, layout and conversion of a model. Equal on all ranks."""

    stack: Stack
    layout: Layout
    conversion: ParallelizePlan | None
    """of the blocks' layers; None without a cube, and for a model that is converted already"""
    pretrained: Sequence[FolderPlan] = ()
    """the tensors that it takes from the folders of `init_from`; none if an earlier run has given it values"""


def plan_for(
    trainer: "pl.Trainer", module: "pl.LightningModule", prepared: PreparedModel, options: Options, topology: Topology
) -> ModelPlan:
    """Plan the module for a run of this Trainer. Needs no process group.

    Raises:
        HanayoError: it can't be run so.
    """
    steady = not user_hooks.clips_by_norm(trainer, module)
    if drives_itself(module):
        options = replace(options, num_microbatches=1)
    return plan_model(module, options, topology, steady=steady, is_converted=prepared.cube is not None)


def drives_itself(module: "pl.LightningModule") -> str | None:
    """Why the module's steps run on whole batches, which one rank without others allows; None: they may be cut."""
    if not module.automatic_optimization:
        return "uses manual optimization"
    return "takes dataloader_iter" if user_hooks.takes_dataloader_iter(module) else None


def plan_model(
    model: nn.Module, options: Options, topology: Topology, *, steady: bool, is_converted: bool
) -> ModelPlan:
    """Plan a whole model. Needs no process group, so errors show before any process starts.

    `steady` says whether nothing makes ranks wait for each other between steps; `is_converted`, whether an earlier run
    has converted the layers.

    Raises:
        HanayoError: no stack, too few blocks, hooks on blocks or parameters, a size that doesn't divide over the
            cube, or a folder of values that doesn't fit.
    """
    checks.check_shapes(model)
    find = find_stack if topology.replica_size > 1 else find_stack_if_any
    stack = find(model, options.stack)
    if prod(topology.cube) > 1:
        stack = stack.uncompiled
    if topology.replica_size > 1:
        check_hooks(stack.named_modules)
        checks.check_cuda_graphs(model, stack)
    try:
        layout = choose_layout(options, topology, len(stack), steady=steady)
    except TooFewBlocks as error:
        raise TooFewBlocks(f"{error}{other_lists(model, stack, longer=True)}") from None
    if topology.replica_size > 1 or layout.num_microbatches > 1:
        check_parameter_hooks(dict(model.named_parameters()))
    if not isinstance(options.balance, str) and len(options.balance) != len(stack):
        raise HanayoError(f"balance has {len(options.balance)} costs, but {stack.name} has {len(stack)} blocks")
    pretrained = plan_pretrained(model, stack.name, options.init_folders) if not was_read(model) else ()
    if is_converted:
        return ModelPlan(stack, layout, None, pretrained)
    checks.check_not_converted(model)
    return ModelPlan(stack, layout, _plan_conversion(model, stack, options, topology), pretrained)


def choose_layout(options: Options, topology: Topology, num_blocks: int, *, steady: bool) -> Layout:
    """The schedule, stages and micro-batches of a run with these options, for a stack of so many blocks.

    `steady`: whether nothing makes ranks wait for each other between steps.

    Raises:
        HanayoError: an unknown schedule, or costs of other stages.
        TooFewBlocks: than stages.
    """
    costs, schedule = options.costs, options.schedule
    if costs is None and options.recompute in ("blocks", "attention"):
        costs = RECOMPUTING[str(options.recompute)]
    may_wave = options.num_waves != "auto" or num_blocks >= 2 * topology.pipe
    if options.recompute != "none" and schedule == AUTO and topology.pipe > 1 and may_wave:
        schedule = _WHOLE_BACKWARD
    num_microbatches = options.num_microbatches
    if options.step == "batch" and topology.replica_size == 1:
        num_microbatches = 1  # one rank holds the whole stack
    return choose(
        num_ranks=topology.pipe,
        num_blocks=max(1, num_blocks),
        num_waves=options.num_waves,
        num_microbatches=num_microbatches,
        schedule=schedule,
        activation_budget=options.activation_budget,
        costs=costs,
        steady=steady,
        separate_loss_stage=prod(topology.cube) > 1,
        pairs=options.pairs and prod(topology.cube) > 1,
        runs_step_once=options.step == "batch" and topology.replica_size > 1,
    )


def recomputed_modules(recompute: Recompute, layout: Layout, ownership: Ownership, rank: int) -> list[nn.Module]:
    """The modules of this rank that run again in the backward.

    Raises:
        UnsupportedError: "attention", and a block has none.
    """
    stack, stages = ownership.stack, [ownership.stages[stage] for stage in ownership.stages_of(rank)]
    if isinstance(recompute, int):
        chosen = [i for own in stages for i in own[: num_recomputed(recompute, len(own), layout, rank)]]
    elif recompute == "none":
        chosen = []
    else:
        chosen = [i for own in stages for i in own]
    named = [(stack.block_names[i], stack.blocks[i]) for i in chosen]
    if callable(recompute):
        named = [(name, block) for name, block in named if recompute(name, block)]
    if recompute != "attention":
        return [block for _, block in named]
    found = [(name, block, attention_of(block)) for name, block in named]
    for name, block, parts in found:
        if not parts:
            what = f"{name}, a {type(block).__name__}, has no module inside whose class is named after attention"
            raise UnsupportedError(f"recompute='attention', but {what}. Use recompute='blocks', or a number of blocks")
    return [part for _, _, parts in found for part in parts]


def num_recomputed(number: int, num_blocks: int, layout: Layout, rank: int) -> int:
    """How many blocks of a stage to recompute, so that this rank keeps no more than the one with most micro-batches.

    That one keeps num_blocks - number blocks of peak[fullest] micro-batches; this one has peak[rank] of them.
    """
    peaks = layout.simulate().peak_activations
    kept = max(0, num_blocks - number)
    room = floor(kept * max(peaks) / peaks[rank] + 1e-9) if peaks[rank] else num_blocks
    return num_blocks - min(num_blocks, max(kept, room))


def report_plan(
    module: "pl.LightningModule", plan: ModelPlan, options: Options, topology: Topology, called: Collection[str]
) -> None:
    """Say on rank 0 which stacks stay whole, and at which cost, and whether batches do. The model is whole.

    `called`: the names of the stacks that the step calls; none if they aren't known.
    """
    if (why := drives_itself(module)) and options.num_microbatches not in ("auto", 1):
        rank_zero_info(f"{type(module).__name__} {why}: steps run on whole batches, as with num_microbatches=1")
    if options.pairs and prod(topology.cube) == 1:
        rank_zero_info(
            "pairs=True does nothing without a cube: sums and gathers over data ranks overlap with other stages' "
            "work anyway, and at the ends of a batch no second micro-batch is ready (docs/concepts/cube.md)."
        )
    if topology.pipe > 1 and (text := describe_uncut(module, plan.stack, called or None)):
        rank_zero_info(text)


def _plan_conversion(model: nn.Module, stack: Stack, options: Options, topology: Topology) -> ParallelizePlan | None:
    if prod(topology.cube) == 1:
        return None
    checks.check_quantized_layers(model)
    checks.check_batch_statistics(model, stack, options)
    outside = {p for module in modules_outside(model, stack) for p in module.parameters(recurse=False)}
    plan = plan_parallelize(
        stack.blocks,
        stack.name,
        topology.cube,
        tokens=options.cube_tokens,
        outside=outside,
        exclude=options.cube_exclude,
        experts=options.experts,
    )
    if options.pairs:
        _check_pairs(plan, stack, options)
    return plan


def _check_pairs(plan: ParallelizePlan, stack: Stack, options: Options) -> None:
    """Check that a rank can work on two micro-batches at once, in two threads.

    Raises:
        HanayoError: the blocks, or the code around them, change something that both threads use.
    """
    if not plan.is_registered:
        what = f"{type(stack.blocks[0]).__name__} is no registered block: its parameters change while its code runs"
        raise HanayoError(f"pairs=True: {what}. Leave pairs out, or register it (docs/guides/tensor3d-layers.md)")
    if options.cube_outside == "tokens":
        why = "pairs=True and cube_outside='tokens': user code would start collectives while another micro-batch runs"
        raise HanayoError(f"{why}. Set cube_outside='share', or leave pairs out")
    if options.recompute != "none":
        why = "pairs=True and recompute: a backward would run blocks again while another micro-batch runs them"
        raise HanayoError(f"{why}. Leave one of both out; cube_memory='shards' saves memory, too")

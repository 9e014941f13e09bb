"""Builds this rank's part of a pipeline from a whole model: cut, placeholders, 3-D layers, initial values, stages."""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_hanayo.clock import clock_for
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.overlap.turns import ActionState, DeviceTurns
from lightning_hanayo.packed_values import stored_tensors
from lightning_hanayo.partition.block_times import measure_block_times
from lightning_hanayo.partition.cut import Load, cut, stage_shares
from lightning_hanayo.partition.deferred_init import DeferredInit, MetaCopy, is_deferred
from lightning_hanayo.partition.ownership import Ownership, Placeholder, replace_with_placeholders
from lightning_hanayo.partition.stack import Stack, modules_outside, num_parameters_outside, other_lists
from lightning_hanayo.pipeline_parallel import split_backward
from lightning_hanayo.pipeline_parallel.capture import forward_patch
from lightning_hanayo.pipeline_parallel.capture.carriers import NO_CARRIERS, Carriers, FilledArguments, RecordedOutputs
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import StandIns
from lightning_hanayo.pipeline_parallel.capture.state import ModuleState, kept_parameters
from lightning_hanayo.pipeline_parallel.capture.state_carrier import StateCarrier
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep
from lightning_hanayo.pipeline_parallel.capture.whole_step import WholeStep
from lightning_hanayo.pipeline_parallel.engine import Engine
from lightning_hanayo.pipeline_parallel.first_batch import FirstBatch
from lightning_hanayo.pipeline_parallel.grad_sync import GradientAllReduce, TiedGradients, sparse_weights
from lightning_hanayo.pipeline_parallel.graph_boundary import recompute
from lightning_hanayo.pipeline_parallel.object_collectives import ReplicatedTensors
from lightning_hanayo.pipeline_parallel.p2p import PointToPointChannel
from lightning_hanayo.pipeline_parallel.rng import NO_STREAMS, RandomStreams
from lightning_hanayo.pipeline_parallel.shared_weights import SharedWeights
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import (
    FirstStage,
    LastStage,
    MiddleStage,
    NoHooks,
    NoReshard,
    SingleStage,
    Stage,
    TensorParallelFirstStage,
)
from lightning_hanayo.pipeline_parallel.trace import Trace
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.schedule import Kind
from lightning_hanayo.schedule.communication import message_pairs
from lightning_hanayo.strategy.batch_split import BatchSplitter
from lightning_hanayo.strategy.lightning import user_hooks
from lightning_hanayo.strategy.lightning.metrics import BlockLogs
from lightning_hanayo.strategy.optimizer_shards import OptimizerShards
from lightning_hanayo.strategy.pipeline import OUTSIDE, Ends, GradientSync, Pipeline
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.setup.plan import ModelPlan, recomputed_modules
from lightning_hanayo.strategy.setup.prepared_model import Cube, PreparedModel
from lightning_hanayo.strategy.setup.values import (
    FullParameters,
    fill_initial_values,
    load_on_all_ranks,
    load_pretrained,
    make_room,
)
from lightning_hanayo.strategy.step_state import StepState
from lightning_hanayo.tensor_parallel.mesh import MeshAxis


def build_pipeline(
    run: Run, plan: ModelPlan, prepared: PreparedModel, streams: RandomStreams, given: Collection[str] = ()
) -> Pipeline:
    """Cut the run's module into this rank's stages and connect them. Called by all ranks of the world.

    Args:
        run: its module is whole, and the same on all ranks; afterwards parameters of other ranks are placeholders.
        plan: of the stack, the layout and the cube.
        prepared: the changes of earlier runs to the model; takes the blocks of each stage.
        streams: of random numbers.
        given: the names of tensors that get their values from a checkpoint.
    """
    model, layout, cube = run.module, plan.layout, prepared.cube
    table = layout.table(layout.num_microbatches)
    stage_blocks = [range(len(plan.stack))] if layout.num_stages == 1 else prepared.stage_blocks
    # A copy of a module may be trained on a layout with another number of stages.
    if stage_blocks is None or len(stage_blocks) != layout.num_stages:
        loads = _loads(plan, run)
        stage_blocks = cut(loads, table.stage_ranks[: layout.num_stages], outside_stage=_outside_stage(layout))
        prepared.stage_shares = stage_shares(loads[0], stage_blocks, _outside_stage(layout))
    if run.options.costs is None and prepared.stage_shares is not None:
        layout = layout.with_shares(prepared.stage_shares)
        table = layout.table(layout.num_microbatches)
    loss_stage = [range(0)] if table.loss_stage else []
    kept = kept_parameters(plan.stack.blocks, plan.stack.name) if layout.num_stages > 1 else ()
    ownership = Ownership(plan.stack, (*stage_blocks, *loss_stage), table.stage_ranks, tuple(kept))
    ownership.check(model)
    if cube is not None:
        ownership.check_cube(model)
    prepared.ownership = ownership  # from now on the module is cut
    transport = ProcessGroupTransport(
        run.groups.pipe_ranks,
        control=run.groups.control,
        channels=run.groups.channels.connect(message_pairs(table)),
        device=run.device,
        on_failure=run.failures.on_transfer,
    )
    deferred = DeferredInit(model, run.seed) if is_deferred(model) else None
    builder = RankBuilder(ownership, run, cube, streams)
    parameters = builder.keep_own()
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(run.device))
    if cube is not None:
        cube.parallelize({stage: ownership.blocks(stage) for stage in builder.numbers}, parameters)
        cube.keep_vocabulary(builder.outside if run.options.cube_outside == "tokens" else ())
    full_parameters = builder.guard_parameters()
    own_modules = builder.own_modules
    if plan.pretrained:
        load = partial(load_pretrained, plan.pretrained, model, own_modules, deferred, run.device, cube)
        load_on_all_ranks(plan.pretrained, model, load)
    if deferred is not None:
        make_room(deferred, model, own_modules, given, run.device)
        fill_initial_values(deferred, own_modules, run.device, cube)

    weights, shared = ownership.shared_parameters(model), None
    if weights:
        shared = SharedWeights(model, weights, run.groups.replica_tensors, run.device)
        if run.trainer.state.fn == TrainerFn.FITTING and run.options.shard_optimizer and run.groups.data is not None:
            raise UnsupportedError(
                "shard_optimizer=True can't shard a model whose blocks share weights over pipeline ranks. Leave it out."
            )
    with nullcontext() if shared is None else shared.lent():
        stages, ends = builder.build_stages(layout)
    gradients = builder.gradient_sync(full_parameters, shared)
    engine = Engine(
        stages,
        PointToPointChannel(transport),
        gradients.stages.start,
        Trace(clock_for(run.device)),
        before_forward=gradients.finish_gather,
        streams=streams,
        values=run.values,
        turns=builder.turns(stages),
    )
    splitter = BatchSplitter(run.options.batch_rule, may_run_whole=table.num_stages == 1)
    prepared.stage_blocks = stage_blocks  # only now: a failed set-up leaves nothing to reuse
    return Pipeline(
        layout,
        ownership,
        transport.rank,
        engine,
        run.pipe_relay,
        parameters,
        gradients,
        splitter if cube is None else cube.splitter,
        splitter if cube is None else cube.whole_splitter,
        (lambda value: [value]) if cube is None else cube.all_gather,
        builder.step_state(),
        next(iter(ends.values())).user_step if ends else None,
        ends,
        streams,
    )


@dataclass(eq=False)
class RankBuilder:
    """Builds the parts of one rank from a model that has been cut."""

    ownership: Ownership
    run: Run
    cube: Cube | None
    streams: RandomStreams

    def __post_init__(self) -> None:
        self.model = self.run.module
        """has this rank's parameters, in a cube its shards of them, and placeholders elsewhere, after `keep_own`"""
        self.numbers = self.ownership.stages_of(self.run.pipe_rank)
        """of this rank's stages"""
        self.end = len(self.ownership.stages) - 1
        """the last stage"""

    @property
    def outside(self) -> Sequence[nn.Module]:
        """The modules outside the stack."""
        return modules_outside(self.model, self.ownership.stack)

    @property
    def own_modules(self) -> list[nn.Module]:
        """The modules of this rank's blocks, and those outside the stack on the rank that has stage 0."""
        blocks = [block for stage in self.numbers for block in self.ownership.blocks(stage)]
        return [*(self.outside if 0 in self.numbers else ()), *(part for block in blocks for part in block.modules())]

    def keep_own(self) -> list[nn.Parameter]:
        """Replace other pipeline ranks' parameters by placeholders; return those of this one, in the model's order."""
        model, ownership = self.model, self.ownership
        kept = {p for own in ownership.stage_parameters(model, self.numbers).values() for p in own}
        own = set(self.own_modules)  # blocks may share a module without parameters
        others = (part for block in ownership.stack.blocks for part in block.modules())
        replace_with_placeholders(model, kept, buffers_of=[part for part in others if part not in own])
        parameters = model.named_parameters()
        missing = [name for name, parameter in parameters if parameter in kept and isinstance(parameter, Placeholder)]
        if missing:
            raise UnsupportedError(
                f"{missing[0]} has no values on pipeline rank {self.run.pipe_rank}, to which a hook or a layout moves "
                "it. Build the model anew and load a checkpoint, or give it those of trainer.strategy.full_parameter."
            )
        return [parameter for parameter in model.parameters() if parameter in kept]

    def guard_parameters(self) -> FullParameters:
        """Guard parameters that user code can't use as they are; return the object that gives it whole ones."""
        parameters, owners = dict(self.model.named_parameters()), self.ownership.rank_by_name(self.model)
        run, cube = self.run, self.cube
        shapes, in_steps = (cube.whole_shapes, cube.parts_in_steps) if cube is not None else ({}, {})
        run.guard.watch(parameters, owners, shapes, in_steps)
        return FullParameters(run, parameters, owners, cube)

    def build_stages(self, layout: Layout) -> tuple[dict[int, Stage], dict[bool, Ends]]:
        """This rank's stages by number, and those with user code by whether the step runs once.

        There are none with user code above pipeline rank 0. Patches the blocks' forwards for them.
        """
        model, ownership, run, cube, streams = self.model, self.ownership, self.run, self.cube, self.streams
        tied = TiedGradients(in_order=run.options.tied_gradients == "in_order")
        queues = {stage: WeightGradientQueue() for stage in self.numbers} | (cube.queues if cube is not None else {})
        is_single = self.end == 0  # a single stage runs the blocks where the user's code calls them
        rows = layout.table(layout.num_microbatches).actions
        splits_backward = any(action.kind is Kind.W for row in rows for action in row)
        if splits_backward and not is_single:  # no rank waits for a single stage's input gradient
            keep = ownership.tied_parameters(model)
            for stage in self.numbers:
                split_backward.patch_linear_layers(ownership.blocks(stage), queues[stage], keep=keep)
        stack = ownership.stack
        recompute(recomputed_modules(run.options.recompute, layout, ownership, run.pipe_rank))
        if cube is not None and "torch._dynamo" in sys.modules:  # whose import takes seconds
            # layers of compiled blocks hand results to each other by attributes: recomputed ones are in the graph
            run.attributes.set(torch._dynamo.config, "skip_fwd_side_effects_in_bwd_under_checkpoint", True)
        if streams is not NO_STREAMS or not is_single:
            forward_patch.patch_blocks(stack.blocks, streams, values=run.values, single_stage=is_single)
        encoders = (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))
        for encoder in encoders if not is_single else ():
            # In evaluation it makes nested tensors of padded ones, which can't be sent. Values agree.
            run.attributes.set(encoder, "use_nested_tensor", False)
        carriers = NO_CARRIERS if is_single else self.carriers()
        hooks: Any = (lambda _: NoHooks()) if cube is None else cube.stage_hooks
        common: dict[int, dict[str, Any]] = {
            stage: {"queue": queues[stage], "hooks": hooks(stage), "carriers": carriers} for stage in self.numbers
        }
        stages: dict[int, Stage] = {
            stage: MiddleStage(blocks=ownership.blocks(stage), **own) for stage, own in common.items()
        }
        if 0 not in self.numbers:
            return stages, {}
        around: dict[str, Any] = {
            "streams": streams,
            "carriers": carriers,
            "guarded": run.guard.step,
            "sends_objects": cube is None or cube.keeps_layout,
            "other_lists": partial(other_lists, model, stack),
            "stand_ins": StandIns(self._without_values),
        }
        ends: dict[bool, Ends] = {}
        if not layout.runs_step_once:
            step = UserStep(stack.blocks, len(ownership.stages[0]) if cube is None else 0, stack.name, **around)
            ends[False] = Ends(step, stages | self._ends(step, common, tied))
        may_run_once = run.options.step == "auto" and not is_single and not run.options.pairs
        if layout.runs_step_once or may_run_once:
            around |= {"outside": self.outside, "own_rows": int if cube is None else cube.own_rows}
            whole = WholeStep(stack.blocks, 0, stack.name, **around)
            ends[True] = Ends(whole, stages | self._ends(whole, common, tied))
        return dict(next(iter(ends.values())).stages), ends

    def _without_values(self, block: nn.Module) -> tuple[nn.Module, Mapping[torch.Tensor, tuple[int, ...]]]:
        """A copy of a block without values, and the whole shapes of the parameters of which ranks have parts."""
        copied = MetaCopy(block).modules[""]
        forward_patch.unpatch_blocks([copied])  # before the cube's own changes are undone, which came first
        return copied, {} if self.cube is None else self.cube.undo_in_copy(block, copied)

    def _ends(self, step: UserStep, common: Mapping[int, Mapping[str, Any]], tied: TiedGradients) -> dict[int, Stage]:
        """The stages that run user code: the first and the last, or one that is both."""
        cube, blocks, is_whole = self.cube, self.ownership.blocks, isinstance(step, WholeStep)
        if self.end == 0 and not is_whole:
            return {0: SingleStage(user=step, **common[0])}
        boundary = NoReshard() if cube is None else cube.whole_boundary if is_whole else cube.boundary
        first = FirstStage(user=step, tied=tied, **common[0])
        if cube is not None or is_whole:  # no block runs in the step
            names: dict[str, Any] = {} if cube is None else {"streams": cube.plan.streams, "masks": cube.plan.masks}
            first = TensorParallelFirstStage(
                user=step, tied=tied, blocks=blocks(0), boundary=boundary, **names, **common[0]
            )
        last = LastStage(blocks=blocks(self.end), first=first, boundary=boundary, **common[self.end])
        return {0: first, self.end: last}

    def carriers(self) -> Carriers:
        """The carriers of values between the step and blocks on other ranks, besides the blocks' arguments."""
        stack, alike = self.ownership.stack, self.cube is None or self.cube.keeps_layout
        own = {i for stage in self.numbers for i in self.ownership.stages[stage]}
        state = ModuleState(self.model, stack.blocks, stack.name)
        return (
            StateCarrier(state, stack.blocks, own, has_tensors=alike),
            RecordedOutputs(self.model, accepts=alike),
            BlockLogs(self.model, rejects=not alike),
            FilledArguments(),
        )

    def gradient_sync(self, full_parameters: FullParameters, shared: SharedWeights | None) -> GradientSync:
        """Sum over data ranks; in a cube also over axes with partial gradients, and separately outside the stack."""
        groups, cube = self.run.groups, self.cube
        trained = self.ownership.stage_parameters(self.model, self.numbers)
        if cube is None:
            sparse = sparse_weights(self.model).values()
            shards = self._optimizer_shards(trained, sparse)
            late = set() if shared is None else set(shared.weights)
            early = {stage: [one for one in own if one not in late] for stage, own in trained.items()}
            owned = shared.weights if shared is not None and self.run.pipe_rank == 0 else ()
            all_reduce = GradientAllReduce(early, groups.data, sparse, shards)
            over_data = GradientAllReduce({0: owned}, groups.data)
            return GradientSync(all_reduce, over_data, full_parameters, None, shards, shared)
        outside = cube.outside
        excluded = set(outside.parameters)
        sharded = {stage: [p for p in own if p not in excluded] for stage, own in trained.items()}
        shards = self._optimizer_shards({OUTSIDE: outside.parameters, **sharded})
        all_reduce = GradientAllReduce(
            sharded, lambda parameter: groups.summing(cube.shards[parameter].partial), scatter=shards
        )
        over_data = GradientAllReduce({0: outside.parameters}, groups.data, scatter=shards)
        return GradientSync(all_reduce, over_data, full_parameters, outside, shards)

    def _optimizer_shards(
        self, stages: Mapping[int, Sequence[nn.Parameter]], whole: Iterable[torch.Tensor] = ()
    ) -> OptimizerShards | None:
        """The rows of each parameter that this data rank will update; None if no optimizer is sharded."""
        data, trainer = self.run.groups.data, self.run.trainer
        if data is None or trainer.state.fn != TrainerFn.FITTING or not self.run.options.shard_optimizer:
            return None
        axis = MeshAxis(data, data.size(), data.rank(), what="rows of a sharded optimizer")
        scatters = not user_hooks.may_see_gradients(trainer)  # else user code may want sums of all rows
        return OptimizerShards(stages, axis, self.cube, whole=frozenset(whole), scatters=scatters)

    def turns(self, stages: Mapping[int, Stage]) -> DeviceTurns | None:
        """The turns of two actions of this rank that run at once, if that is asked for."""
        cube, run = self.cube, self.run
        if cube is None or cube.queue is None or not run.options.pairs:
            return None
        states: list[ActionState] = [run.values, *(stage.queue for stage in stages.values()), self.streams]
        cube.queue.turns.states = states
        return cube.queue.turns

    def step_state(self) -> StepState:
        """Watches the tensors that steps may change here; in a cube some modules run on each rank's own samples."""
        named, cube, groups = list(self.model.named_modules()), self.cube, self.run.groups
        own, outside = set(self.own_modules), set(self.outside)
        alike = set() if cube is None or cube.shares_samples else outside
        over_data = None
        if groups.data is not None and groups.data_control is not None:
            over_data = ReplicatedTensors(groups.data_control, groups.data, self.run.device)
        return StepState(
            {name: module for name, module in named if module in own},
            {name: p for name, p in self.model.named_parameters() if not isinstance(p, Placeholder)},
            own - alike,
            None if cube is None else cube.mesh,
            {name: module for name, module in named if module in outside},
            groups.control if len(groups.pipe_ranks) > 1 else None,
            over_data,
        )


def examine_first_batch(run: Run, pipeline: Pipeline, cube: Cube | None) -> None:
    """Let the first batch show that its micro-batches, and those of other data ranks, add up to it."""
    ownership, count, num_data = pipeline.ownership, pipeline.layout.num_microbatches, run.topology.data
    if count * num_data == 1 and cube is None:
        return
    own = [index for stage in ownership.stages_of(pipeline.rank) for index in ownership.stages[stage]]
    pipeline.first_batch = FirstBatch(
        blocks={index: ownership.stack.blocks[index] for index in own},
        values=run.values,
        device=run.device,
        num_microbatches=count,
        num_data=num_data,
        is_single=pipeline.is_single,
        is_cube=cube is not None,
        runs_blocks=cube is None or not cube.plan.is_registered,
        shares_samples=cube is None or cube.shares_samples,
        own_rows=int if cube is None else cube.own_rows,
        carriers=next(iter(pipeline.engine.stages.values())).carriers,
        share=partial(run.failures.gather, "what the first batch shows"),
        warns=run.rank == 0,
    )


def whole_values(model: nn.Module) -> Sequence[torch.Tensor]:
    """The plain tensors with all values of a whole model, on which the ranks must agree.

    Empty if it has placeholders, from an earlier run.
    """
    if any(isinstance(parameter, Placeholder) for parameter in model.parameters()):
        return []
    stored = (one for tensor in (*model.parameters(), *model.buffers()) for one in stored_tensors(tensor))
    return [tensor for tensor in stored if not tensor.is_meta]


def _loads(plan: ModelPlan, run: Run) -> list[Load]:
    """The loads that pipeline ranks are to share evenly, the same on all of them: time, and parameters."""
    model, stack, options = run.module, plan.stack, run.options
    sizes = [float(sum(p.numel() for p in block.parameters())) for block in stack.blocks]
    parameters = Load(sizes, num_parameters_outside(model, stack))
    once = plan.layout.runs_step_once  # then all ranks wait for the code outside the stack
    if options.balance == "parameters":
        return [Load(sizes, 0 if once else num_parameters_outside(model, stack, computing=True)), parameters]
    if options.balance != "time":
        return [Load([float(cost) for cost in options.balance])]
    times, outside = _measured_times(run, stack)
    return [Load(times, 0.0 if once else outside), parameters]


def _outside_stage(layout: Layout) -> int:
    """Code outside the stack runs on rank 0: with the last stage's blocks in a wave, with the first one's in a loop."""
    return -1 if layout.ends_on_first_rank else 0


def _measured_times(run: Run, stack: Stack) -> tuple[Sequence[float], float]:
    """Seconds of each block, and of everything outside the stack, as rank 0 measured them."""
    example = user_hooks.example_run(run.module, run.device)
    if is_deferred(run.module):
        raise HanayoError("balance='time' runs the model once, but it was built on the meta device; use 'parameters'")
    times, outside = measure_block_times(run.module, stack, example, run.device)
    measured = torch.tensor([*times, outside], dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(measured, src=0)
    *times, outside = measured.tolist()
    return times, outside

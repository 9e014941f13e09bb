"""Builds this rank's part of a pipeline from a whole model: cut, placeholders, 3-D layers, initial values, stages."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_hanayo.clock import clock_for
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.overlap.turns import ActionState
from lightning_hanayo.packed_values import stored_tensors
from lightning_hanayo.partition.block_times import measure_block_times
from lightning_hanayo.partition.cut import Load, cut, stage_shares
from lightning_hanayo.partition.deferred_init import DeferredInit, MetaCopy, is_deferred
from lightning_hanayo.partition.ownership import Ownership, Placeholder, replace_with_placeholders
from lightning_hanayo.partition.stack import Stack, modules_outside, num_parameters_outside, other_lists
from lightning_hanayo.pipeline_parallel import split_backward
from lightning_hanayo.pipeline_parallel.autograd.recomputation import recompute
from lightning_hanayo.pipeline_parallel.capture import forward_patch
from lightning_hanayo.pipeline_parallel.capture.between import StandIns
from lightning_hanayo.pipeline_parallel.capture.carriers import NO_CARRIERS, Carriers, FilledArguments, RecordedOutputs
from lightning_hanayo.pipeline_parallel.capture.state import ModuleState, kept_parameters
from lightning_hanayo.pipeline_parallel.capture.state_carrier import StateCarrier
from lightning_hanayo.pipeline_parallel.capture.user_step import ReplacedParameters, UserStep
from lightning_hanayo.pipeline_parallel.capture.whole_step import WholeStep
from lightning_hanayo.pipeline_parallel.comm.object_collectives import broadcast_object
from lightning_hanayo.pipeline_parallel.comm.replicated_tensors import ReplicatedTensors
from lightning_hanayo.pipeline_parallel.engine import Engine
from lightning_hanayo.pipeline_parallel.first_batch import FirstBatch
from lightning_hanayo.pipeline_parallel.grad_sync import GradientAllReduce, TiedGradients, sparse_weights
from lightning_hanayo.pipeline_parallel.p2p import PointToPointChannel
from lightning_hanayo.pipeline_parallel.pairs import Pairs
from lightning_hanayo.pipeline_parallel.profiling.trace import Trace
from lightning_hanayo.pipeline_parallel.rng import RandomStreams
from lightning_hanayo.pipeline_parallel.shared_weights import SharedWeights
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import FirstStage, LastStage, MiddleStage, NoHooks, SingleStage, Stage
from lightning_hanayo.pipeline_parallel.tp_stages import (
    NoReshard,
    TensorParallelFirstStage,
    TensorParallelLastStage,
    WholeBatchFirstStage,
    WholeBatchLastStage,
)
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.schedule import Kind, Schedule
from lightning_hanayo.schedule.communication import message_pairs
from lightning_hanayo.strategy.batch_split import BatchSplitter, SingleRankSplitter, WholeSplitter
from lightning_hanayo.strategy.groups import ProcessGroups
from lightning_hanayo.strategy.lightning.metrics import BlockLogs
from lightning_hanayo.strategy.optimizer.shards import OptimizerShards
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.pipeline import OUTSIDE, Ends, GradientSync, Pipeline
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.strategy.setup.full_parameters import FullParameters
from lightning_hanayo.strategy.setup.plan import ModelPlan, recomputed_modules
from lightning_hanayo.strategy.setup.prepared_model import PreparedModel
from lightning_hanayo.strategy.setup.values import fill_initial_values, load_on_all_ranks, make_room
from lightning_hanayo.strategy.step_state import StepState
from lightning_hanayo.tensor_parallel.mesh import MeshAxis


def build_pipeline(
    model: nn.Module,
    plan: ModelPlan,
    prepared: PreparedModel,
    run: Run,
    streams: RandomStreams | None,
    example: Callable[[], object] | None = None,
    given: Collection[str] = (),
    *,
    scatters_gradients: bool | None = None,
) -> Pipeline:
    """Cut `model` into this rank's stages and connect them. Called by all ranks of the world.

    Args:
        model: whole, and the same on all ranks; afterwards the parameters of other ranks are placeholders.
        plan: of the stack, the layout and the cube.
        prepared: the changes of earlier runs to the model; takes the blocks of each stage.
        run: of the Trainer.
        streams: of random numbers; None: torch's own generators, unchanged.
        example: runs the model once, for `balance="time"`.
        given: the names of tensors that get their values from a checkpoint.
        scatters_gradients: whether data ranks may have sums of their own rows only; None: nothing is trained.
    """
    layout, cube = plan.layout, prepared.cube
    table = layout.table(layout.num_microbatches)
    stage_blocks = [range(len(plan.stack))] if layout.num_stages == 1 else _known_cut(prepared, layout)
    if stage_blocks is None:
        loads = _loads(model, plan, run, example)
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
    transport = _transport(run, table)
    rank = transport.rank
    deferred = DeferredInit(model, run.seed) if is_deferred(model) else None
    parameters = _keep_own(model, ownership, rank)
    _move(model, run.device)
    if cube is not None:
        blocks = {stage: ownership.blocks(stage) for stage in ownership.stages_of(rank)}
        cube.parallelize(blocks, parameters)
        cube.keep_vocabulary(modules_outside(model, plan.stack) if run.options.cube_outside == "tokens" else ())
    full_parameters = _guard_parameters(model, ownership, rank, cube, run)
    own_modules = _own_modules(model, ownership, rank)
    if plan.pretrained:
        load_on_all_ranks(plan.pretrained, model, own_modules, deferred, run.device, cube)
    if deferred is not None:
        make_room(deferred, model, own_modules, given, run.device)
        fill_initial_values(deferred, own_modules, run.device, cube)

    weights, shared = ownership.shared_parameters(model), None
    if weights:
        shared = SharedWeights(model, weights, run.groups.replica_tensors, run.device)
        if scatters_gradients is not None and run.options.shard_optimizer and run.groups.data is not None:
            raise UnsupportedError(
                "shard_optimizer=True can't shard a model whose blocks share weights over pipeline ranks. Leave it out."
            )
    with nullcontext() if shared is None else shared.lent():
        stages, ends = build_stages(
            model, layout, ownership, rank, run, cube, streams, may_run_once=may_run_once(run, ownership)
        )
    gradients = _gradient_sync(model, ownership, rank, run, cube, full_parameters, scatters_gradients, shared)
    engine = Engine(
        stages,
        PointToPointChannel(transport),
        gradients.stages.start,
        Trace(clock_for(run.device)),
        before_forward=gradients.finish_gather,
        streams=streams,
        values=run.values,
        pairs=_pairs(run, model, cube, stages, streams),
    )
    splitter, stack_splitter = _splitters(run.options, table, cube)
    prepared.stage_blocks = stage_blocks  # only now: a failed set-up leaves nothing to reuse
    return Pipeline(
        layout,
        ownership,
        rank,
        engine,
        run.pipe_relay,
        parameters,
        gradients,
        splitter,
        stack_splitter,
        (lambda value: [value]) if cube is None else cube.all_gather,
        _step_state(model, ownership, rank, cube, run.groups, run.device),
        next(iter(ends.values())).user_step if ends else None,
        ends,
        streams,
    )


def _splitters(options: Options, table: Schedule, cube: Cube | None) -> tuple[BatchSplitter, BatchSplitter]:
    """Of batches whose step runs for each micro-batch, and of those whose step runs once."""
    if cube is not None:
        return cube.splitter, cube.whole_splitter
    made = (SingleRankSplitter if table.num_stages == 1 else WholeSplitter)(options.batch_rule)
    return made, made


def may_run_once(run: Run, ownership: Ownership) -> bool:
    """Whether the step may run once on some batches, and on others once for each micro-batch."""
    return run.options.step == "auto" and len(ownership.stages) > 1 and not run.options.pairs


def _pairs(
    run: Run, model: nn.Module, cube: Cube | None, stages: Mapping[int, Stage], streams: RandomStreams | None
) -> Pairs | None:
    """The runner of two actions of this rank at once, if that is asked for."""
    groups = run.groups.cube
    if groups is None or cube is None or not run.options.pairs:
        return None
    if cube.queue is None:
        rank_zero_warn(
            "pairs=True has no effect: the layers of this module were parallelized in an earlier run without it. Build "
            "the module anew."
        )
        return None
    whole, parameters = groups.whole, list(model.parameters())
    states: list[ActionState] = [run.values, *(stage.queue for stage in stages.values())]
    if streams is not None:
        states.append(streams)
    return Pairs(
        cube.queue,
        states,
        lambda plans: broadcast_object(plans, whole),
        trained=lambda: hash(tuple(parameter.requires_grad for parameter in parameters)),
        is_first=whole.rank() == 0,
        is_planned=cube.queue.keeps_plans,
    )


def _transport(run: Run, table: Schedule) -> ProcessGroupTransport:
    """A new transport for the table among the ranks of this rank's pipeline. Called by all ranks of the world."""
    return ProcessGroupTransport(
        run.groups.pipe_ranks,
        control=run.groups.control,
        channels=run.groups.channels.connect(message_pairs(table)),
        device=run.device,
        on_failure=run.failures.on_transfer,
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
        keeps_samples=cube is None or cube.keeps_layout,
        num_shares=1 if cube is None else cube.mesh.num_ranks,
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


def _guard_parameters(model: nn.Module, ownership: Ownership, rank: int, cube: Cube | None, run: Run) -> FullParameters:
    """Guard parameters that user code can't use as they are; return the object that gives it whole ones."""
    parameters, owners = dict(model.named_parameters()), ownership.rank_by_name(model)
    shapes, in_steps = (cube.whole_shapes, cube.parts_in_steps) if cube is not None else ({}, {})
    run.guard.watch(parameters, owners, shapes, in_steps)
    return FullParameters(parameters, owners, rank, run.groups, cube, run.guard)


def _gradient_sync(
    model: nn.Module,
    ownership: Ownership,
    rank: int,
    run: Run,
    cube: Cube | None,
    full_parameters: FullParameters,
    scatters: bool | None,
    shared: SharedWeights | None,
) -> GradientSync:
    """Sum over data ranks; in a cube also over axes with partial gradients, and separately outside the stack."""
    groups = run.groups
    trained = ownership.stage_parameters(model, ownership.stages_of(rank))
    if cube is None:
        sparse = sparse_weights(model).values()
        shards = _optimizer_shards(trained, run, None, scatters, sparse)
        late = set() if shared is None else set(shared.weights)
        early = {stage: [one for one in own if one not in late] for stage, own in trained.items()}
        over_data = None
        if shared is not None and groups.data is not None and rank == 0:
            over_data = GradientAllReduce({0: shared.weights}, groups.data)
        all_reduce = GradientAllReduce(early, groups.data, sparse, shards)
        return GradientSync(all_reduce, full_parameters, None, over_data, shards, shared)
    outside = cube.outside
    excluded = set(outside.parameters)
    sharded = {stage: [p for p in own if p not in excluded] for stage, own in trained.items()}
    shards = _optimizer_shards({OUTSIDE: outside.parameters, **sharded}, run, cube, scatters)
    all_reduce = GradientAllReduce(
        sharded, lambda parameter: groups.summing(cube.partial_axes(parameter)), scatter=shards
    )
    over_data = None
    if groups.data is not None:
        over_data = GradientAllReduce({0: outside.parameters}, groups.data, scatter=shards)
    return GradientSync(all_reduce, full_parameters, outside, over_data, shards)


def _optimizer_shards(
    stages: Mapping[int, Sequence[nn.Parameter]],
    run: Run,
    cube: Cube | None,
    scatters: bool | None,
    whole: Iterable[torch.Tensor] = (),
) -> OptimizerShards | None:
    """The rows of each parameter that this data rank will update; None if the optimizer isn't sharded."""
    data = run.groups.data
    if data is None or scatters is None or not run.options.shard_optimizer:
        return None
    axis = MeshAxis(data, data.size(), data.rank(), what="rows of a sharded optimizer")
    return OptimizerShards(stages, axis, cube, whole=frozenset(whole), scatters=scatters)


def _step_state(
    model: nn.Module, ownership: Ownership, rank: int, cube: Cube | None, groups: ProcessGroups, device: torch.device
) -> StepState:
    """Watches the tensors that steps may change here; in a cube some modules run on each rank's own samples."""
    own = set(_own_modules(model, ownership, rank))
    modules = {name: module for name, module in model.named_modules() if module in own}
    outside = set(modules_outside(model, ownership.stack))
    alike = set() if cube is None or cube.shares_samples else outside
    user_modules = {name: module for name, module in model.named_modules() if module in outside}
    pipe_group = groups.control if len(groups.pipe_ranks) > 1 else None
    parameters = {name: p for name, p in model.named_parameters() if not isinstance(p, Placeholder)}
    mesh = None if cube is None else cube.mesh
    over_data = None
    if groups.data is not None and groups.data_control is not None:
        over_data = ReplicatedTensors(groups.data_control, groups.data, device)
    return StepState(modules, parameters, own - alike, mesh, user_modules, pipe_group, over_data)


def _known_cut(prepared: PreparedModel, layout: Layout) -> list[range] | None:
    """The cut of an earlier run. A copy of a module may be trained on a layout with another number of stages."""
    blocks = prepared.stage_blocks
    return blocks if blocks is not None and len(blocks) == layout.num_stages else None


def _loads(model: nn.Module, plan: ModelPlan, run: Run, example: Callable[[], object] | None) -> list[Load]:
    """The loads that pipeline ranks are to share evenly, the same on all of them: time, and parameters."""
    stack, options = plan.stack, run.options
    sizes = [float(sum(p.numel() for p in block.parameters())) for block in stack.blocks]
    parameters = Load(sizes, num_parameters_outside(model, stack))
    once = plan.layout.runs_step_once  # then all ranks wait for the code outside the stack
    if options.balance == "parameters":
        return [Load(sizes, 0 if once else num_parameters_outside(model, stack, computing=True)), parameters]
    if options.balance != "time":
        return [Load([float(cost) for cost in options.balance])]
    times, outside = _measured_times(model, stack, example, run.device)
    return [Load(times, 0.0 if once else outside), parameters]


def _outside_stage(layout: Layout) -> int:
    """Code outside the stack runs on rank 0: with the last stage's blocks in a wave, with the first one's in a loop."""
    return -1 if layout.ends_on_first_rank else 0


def _measured_times(
    model: nn.Module, stack: Stack, example: Callable[[], object] | None, device: torch.device
) -> tuple[Sequence[float], float]:
    """Seconds of each block, and of everything outside the stack, as rank 0 measured them."""
    if is_deferred(model):
        raise HanayoError("balance='time' runs the model once, but it was built on the meta device; use 'parameters'")
    if example is None:
        raise HanayoError("balance='time' runs the model once on `example_input_array`; the LightningModule has none")
    times, outside = measure_block_times(model, stack, example, device)
    measured = torch.tensor([*times, outside], dtype=torch.float64)
    if dist.is_initialized():
        dist.broadcast(measured, src=0)
    *times, outside = measured.tolist()
    return times, outside


def _own_modules(model: nn.Module, ownership: Ownership, rank: int) -> list[nn.Module]:
    """The modules of this rank's blocks, and those outside the stack on the rank that has stage 0."""
    stages = ownership.stages_of(rank)
    outside = modules_outside(model, ownership.stack) if 0 in stages else []
    return [*outside, *(part for stage in stages for block in ownership.blocks(stage) for part in block.modules())]


def _keep_own(model: nn.Module, ownership: Ownership, rank: int) -> list[nn.Parameter]:
    """Replace other pipeline ranks' parameters by placeholders; return those of this one, in the model's order."""
    kept = {p for own in ownership.stage_parameters(model, ownership.stages_of(rank)).values() for p in own}
    own = set(_own_modules(model, ownership, rank))  # blocks may share a module without parameters
    others = (part for block in ownership.stack.blocks for part in block.modules())
    replace_with_placeholders(model, kept, buffers_of=[part for part in others if part not in own])
    parameters = model.named_parameters()
    missing = [name for name, parameter in parameters if parameter in kept and isinstance(parameter, Placeholder)]
    if missing:
        raise UnsupportedError(
            f"{missing[0]} has no values on pipeline rank {rank}, where it belongs now: the model was trained before "
            f"with another layout, or a hook has moved or copied it from modules of another pipeline rank. Build the "
            f"model anew and load a checkpoint, or give a new parameter the values that "
            f"self.trainer.strategy.full_parameter(parameter) returns."
        )
    return [parameter for parameter in model.parameters() if parameter in kept]


def _move(model: nn.Module, device: torch.device) -> None:
    """Move this rank's tensors to `device`; placeholders stay where they are."""
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def build_stages(
    model: nn.Module,
    layout: Layout,
    ownership: Ownership,
    rank: int,
    run: Run,
    cube: Cube | None,
    streams: RandomStreams | None,
    *,
    may_run_once: bool = False,
) -> tuple[dict[int, Stage], dict[bool, Ends]]:
    """This rank's stages by number, and those with user code by whether the step runs once; none above pipeline rank 0.

    Patches the blocks' forwards for them.

    The model has this rank's parameters, in a cube its shards of them, and placeholders elsewhere.
    """
    numbers = ownership.stages_of(rank)
    tied = TiedGradients(in_order=run.options.tied_gradients == "in_order")
    queues = {stage: WeightGradientQueue() for stage in numbers} | (cube.queues if cube is not None else {})
    is_single = len(ownership.stages) == 1  # a single stage runs the blocks where the user's code calls them
    rows = layout.table(layout.num_microbatches).actions
    splits_backward = any(action.kind is Kind.W for row in rows for action in row)
    if splits_backward and not is_single:  # no rank waits for a single stage's input gradient
        keep = ownership.tied_parameters(model)
        for stage in numbers:
            split_backward.patch_linear_layers(ownership.blocks(stage), queues[stage], keep=keep)
    stack = ownership.stack
    recompute(recomputed_modules(run.options.recompute, layout, ownership, rank))
    if streams is not None or not is_single:
        forward_patch.patch_blocks(stack.blocks, streams, values=run.values, single_stage=is_single)
    encoders = (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))
    for encoder in encoders if not is_single else ():
        # In evaluation it makes nested tensors of padded ones, which can't be sent. Values agree.
        run.attributes.set(encoder, "use_nested_tensor", False)
    carriers = NO_CARRIERS if is_single else _carriers(model, ownership, rank, cube)
    hooks = {stage: NoHooks() if cube is None else cube.stage_hooks(stage) for stage in numbers}
    stages: dict[int, Stage] = {
        stage: MiddleStage(blocks=ownership.blocks(stage), queue=queues[stage], hooks=hooks[stage], carriers=carriers)
        for stage in numbers
    }
    if 0 not in numbers:
        return stages, {}
    sends_objects = cube is None or cube.keeps_layout
    replaced = ReplacedParameters(model)
    stand_ins = StandIns(stack.blocks, partial(_without_values, cube))

    def user_step(num_local: int) -> UserStep:
        others = partial(other_lists, model, stack)
        around = carriers, run.guard.step, sends_objects, replaced, others, stand_ins
        return UserStep(stack.blocks, num_local, stack.name, streams, *around)

    ends: dict[bool, Ends] = {}
    if not layout.runs_step_once:
        step = user_step(len(ownership.stages[0]) if cube is None else 0)
        own = (
            _ends(ownership, step, queues, tied) if cube is None else _sharded_ends(ownership, step, queues, tied, cube)
        )
        ends[False] = Ends(step, stages | own)
    if layout.runs_step_once or may_run_once:
        whole = WholeStep(user_step(0), modules_outside(model, stack), int if cube is None else cube.own_rows)
        ends[True] = Ends(whole, stages | _ends_of_whole_batches(ownership, whole, queues, tied, cube))
    return dict(next(iter(ends.values())).stages), ends


def _without_values(cube: Cube | None, block: nn.Module) -> tuple[nn.Module, Mapping[torch.Tensor, tuple[int, ...]]]:
    """A copy of a block without values, and the whole shapes of the parameters of which ranks have parts."""
    copied = MetaCopy(block).modules[""]
    forward_patch.unpatch_blocks([copied])  # before the cube's own changes are undone, which came first
    return copied, {} if cube is None else cube.undo_in_copy(block, copied)


def _ends(
    ownership: Ownership, user_step: UserStep, queues: Mapping[int, WeightGradientQueue], tied: TiedGradients
) -> dict[int, Stage]:
    """The stages that run user code: the first and the last, or one that is both."""
    end = len(ownership.stages) - 1
    if end == 0:
        return {0: SingleStage(user=user_step, queue=queues[0])}
    carriers = user_step.carriers
    first = FirstStage(user=user_step, tied=tied, queue=queues[0], carriers=carriers)
    return {0: first, end: LastStage(blocks=ownership.blocks(end), first=first, queue=queues[end], carriers=carriers)}


def _sharded_ends(
    ownership: Ownership,
    user_step: UserStep,
    queues: Mapping[int, WeightGradientQueue],
    tied: TiedGradients,
    cube: Cube,
) -> dict[int, Stage]:
    """The first and the last stage where the ranks of a cube hold each stage together."""
    end = len(ownership.stages) - 1
    first = TensorParallelFirstStage(
        user=user_step,
        tied=tied,
        queue=queues[0],
        blocks=ownership.blocks(0),
        boundary=cube.boundary,
        streams=cube.plan.streams,
        hooks=cube.stage_hooks(0),
        carriers=user_step.carriers,
    )
    last = TensorParallelLastStage(
        blocks=ownership.blocks(end),
        first=first,
        queue=queues[end],
        boundary=cube.boundary,
        hooks=cube.stage_hooks(end),
        carriers=user_step.carriers,
    )
    return {0: first, end: last}


def _ends_of_whole_batches(
    ownership: Ownership,
    step: WholeStep,
    queues: Mapping[int, WeightGradientQueue],
    tied: TiedGradients,
    cube: Cube | None,
) -> dict[int, Stage]:
    """The first and the last stage where the step runs once on a whole batch."""
    end = len(ownership.stages) - 1
    boundary = NoReshard() if cube is None else cube.whole_boundary
    hooks = [NoHooks() if cube is None else cube.stage_hooks(stage) for stage in (0, end)]
    carriers = step.user.carriers
    first = WholeBatchFirstStage(
        user=step,
        tied=tied,
        queue=queues[0],
        blocks=ownership.blocks(0),
        boundary=boundary,
        streams=() if cube is None else cube.plan.streams,
        hooks=hooks[0],
        carriers=carriers,
    )
    last = WholeBatchLastStage(
        blocks=ownership.blocks(end),
        first=first,
        queue=queues[end],
        boundary=boundary,
        hooks=hooks[1],
        carriers=carriers,
    )
    return {0: first, end: last}


def _carriers(model: nn.Module, ownership: Ownership, rank: int, cube: Cube | None) -> Carriers:
    """The carriers of values between the step and blocks on other ranks, besides the blocks' arguments."""
    stack, numbers = ownership.stack, ownership.stages_of(rank)
    own = {i for stage in numbers for i in ownership.stages[stage]}
    alike = cube is None or cube.keeps_layout
    state = ModuleState(model, stack.blocks, stack.name)

    return Carriers(
        [
            StateCarrier(state, stack.blocks, own, has_tensors=alike),
            RecordedOutputs(model, accepts=alike),
            BlockLogs(model, rejects=not alike),
            FilledArguments(),
        ]
    )

"""The connection: a rank's stages, made out of blocks and user code, and joined to the engine that plays them."""

from collections.abc import Mapping, Sequence

from torch import nn

from lightning_hanayo.partition.ownership import Ownership
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.runtime.capture import forward_patch
from lightning_hanayo.runtime.autograd import linear_patch
from lightning_hanayo.runtime.comm.relay import Relay
from lightning_hanayo.runtime.engine import Engine
from lightning_hanayo.runtime.stages.tensor_parallel_ends import TensorParallelFirstStage, TensorParallelLastStage
from lightning_hanayo.runtime.comm.point_to_point import PointToPointChannel
from lightning_hanayo.runtime.random_streams import RandomStreams
from lightning_hanayo.runtime.autograd.gradient_all_reduce import GradientAllReduce
from lightning_hanayo.runtime.autograd.tied_gradients import TiedGradients
from lightning_hanayo.runtime.stages.base import FirstStage, LastStage, MiddleStage, Stage
from lightning_hanayo.runtime.profiling.trace import Trace
from lightning_hanayo.runtime.comm.transport import Transport
from lightning_hanayo.runtime.capture.user_step import UserStep
from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.runtime.stages.single import SingleStage
from lightning_hanayo.schedule import Kind
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes
from lightning_hanayo.strategy.build.cube import Cube
from lightning_hanayo.strategy.build.process_groups import ProcessGroups
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.sharing import Alone


def connect(
    model: nn.Module,
    layout: Layout,
    ownership: Ownership,
    transport: Transport,
    own: list[nn.Parameter],
    groups: ProcessGroups,
    cube: Cube | None,
    streams: RandomStreams | None,
    chain: Relay,
    changes: TemporaryAttributes,
) -> Pipeline:
    """Make this rank's stages of `model` a part of its pipeline.

    Args:
        model: with this rank's parameters, in a cube its parts of them; placeholders elsewhere.
        layout: what is played.
        ownership: which stages lie where.
        transport: among the ranks of the pipeline.
        own: the parameters that this rank trains.
        groups: this rank's process groups.
        cube: the ranks that hold each stage together; None for one.
        streams: where random numbers come from; None: from torch's own generators as they are.
        chain: over the ranks of the pipeline.
        changes: remembers what is set on the model's modules.
    """
    stack, rank = ownership.stack, transport.rank
    own_stages = ownership.stages_of(rank)
    queues = {stage: WeightGradientQueue() for stage in (*own_stages, 0, len(ownership.stages) - 1)}
    queues |= cube.queues if cube is not None else {}
    if _splits(layout):
        keep = ownership.parameters_of_several(model)
        for stage in own_stages:
            linear_patch.install(ownership.blocks(stage), queues[stage], keep=keep)
    num_local = len(ownership.stages[0]) if cube is None else 0
    user = UserStep(stack.blocks, num_local, stack.name, streams)
    ends = _ends(ownership, user, queues) if cube is None else _gated_ends(ownership, user, queues, cube)
    whole = len(ends) == 1  # a single stage runs the blocks where the user's code calls them
    if streams is not None or not whole:
        forward_patch.install(stack.blocks, streams, num_local=num_local, whole=whole)
    if not whole:
        _keep_padding(model, changes)
    around = {stage: cube.surroundings(stage) if cube is not None else None for stage in own_stages}
    stages = {s: ends.get(s) or MiddleStage(ownership.blocks(s), queues[s], around[s]) for s in own_stages}
    trained = {stage: ownership.stage_parameters(model, stage) for stage in own_stages}
    if cube is None:
        reduction, dense_reduction = GradientAllReduce(trained, groups.data), None
    else:
        reduction, dense_reduction = _reductions(trained, groups, cube)
    engine = Engine(stages, PointToPointChannel(transport), reduction.start, Trace(), streams)
    return Pipeline(
        layout,
        ownership,
        rank,
        engine,
        chain,
        reduction,
        user,
        own,
        Alone() if cube is None else cube.sharing,
        None if cube is None else cube.dense,
        dense_reduction,
        streams,
    )


def _reductions(
    trained: Mapping[int, Sequence[nn.Parameter]], groups: ProcessGroups, cube: Cube
) -> tuple[GradientAllReduce, GradientAllReduce | None]:
    """Of what 3-D layers hold, over data ranks and where it is partial; of dense parts, over data ranks, after them."""
    dense = set(cube.dense.parameters)
    spread = {stage: [p for p in own if p not in dense] for stage, own in trained.items()}
    reduction = GradientAllReduce(spread, lambda parameter: groups.sums_of(cube.partial(parameter)))
    return reduction, None if groups.data is None else GradientAllReduce({0: cube.dense.parameters}, groups.data)


def _ends(
    ownership: Ownership, user: UserStep, queues: Mapping[int, WeightGradientQueue]
) -> dict[int, Stage]:
    """The stages that run user code: the first and the last, or one that is both."""
    end = len(ownership.stages) - 1
    if end == 0:
        return {0: SingleStage(user, queues[0])}
    shared = TiedGradients()
    first = FirstStage(user, shared, queues[0])
    last = LastStage(ownership.blocks(end), user, first, shared, queues[end])
    return {0: first, end: last}


def _gated_ends(
    ownership: Ownership, user: UserStep, queues: Mapping[int, WeightGradientQueue], cube: Cube
) -> dict[int, Stage]:
    """As `_ends`, where the ranks of a cube hold each stage together."""
    end = len(ownership.stages) - 1
    shared = TiedGradients()
    first = TensorParallelFirstStage(
        user,
        shared,
        queues[0],
        blocks=ownership.blocks(0),
        gate=cube.passage,
        streams=cube.plan.streams,
        surroundings=cube.surroundings(0),
    )
    last = TensorParallelLastStage(
        ownership.blocks(end),
        user,
        first,
        shared,
        queues[end],
        gate=cube.passage,
        surroundings=cube.surroundings(end),
    )
    return {0: first, end: last}


def _splits(layout: Layout) -> bool:
    """Whether any backward is split; otherwise layers stay as they are."""
    rows = layout.table(layout.num_microbatches).actions
    return any(action.kind is Kind.W for row in rows for action in row)


def _keep_padding(model: nn.Module, changes: TemporaryAttributes) -> None:
    """Nested tensors, which `nn.TransformerEncoder` makes of padded ones in evaluation, can't cross. Values agree."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            changes.set(module, "use_nested_tensor", False)


def disconnect(pipeline: Pipeline) -> None:
    """End the threads and give the blocks their own forward back."""
    pipeline.close()
    _give_back(pipeline)


def abandon(pipeline: Pipeline) -> None:
    """As `disconnect`, after a failure: without waiting for other ranks."""
    pipeline.abandon()
    _give_back(pipeline)


def _give_back(pipeline: Pipeline) -> None:
    forward_patch.remove(pipeline.ownership.stack.blocks)
    linear_patch.remove(pipeline.ownership.stack.blocks)

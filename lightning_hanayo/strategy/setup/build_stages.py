"""Builds this rank's stages out of blocks and user code, and patches the blocks' forwards for them."""

from collections.abc import Mapping

from torch import nn

from lightning_hanayo.partition.ownership import Ownership
from lightning_hanayo.partition.parameter_guard import ParameterGuard
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.runtime.autograd import linear_patch
from lightning_hanayo.runtime.autograd.recomputation import recompute
from lightning_hanayo.runtime.autograd.tied_gradients import TiedGradients
from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.runtime.capture import forward_patch
from lightning_hanayo.runtime.capture.around_stack.replaced_parameters import ReplacedParameters
from lightning_hanayo.runtime.capture.carried import NO_CARRIERS, Carriers
from lightning_hanayo.runtime.capture.module_state import ModuleState
from lightning_hanayo.runtime.capture.recorded_outputs import RecordedOutputs
from lightning_hanayo.runtime.capture.state_carrier import StateCarrier
from lightning_hanayo.runtime.capture.user_step import UserStep
from lightning_hanayo.runtime.random_streams import RandomStreams
from lightning_hanayo.runtime.stages.base import MiddleStage, Stage
from lightning_hanayo.runtime.stages.first_last import FirstStage, LastStage, SingleStage
from lightning_hanayo.runtime.stages.tensor_parallel_ends import TensorParallelFirstStage, TensorParallelLastStage
from lightning_hanayo.runtime.stages.tensor_parallel_protocols import NoHooks
from lightning_hanayo.runtime.values import MadeValues
from lightning_hanayo.schedule import Kind
from lightning_hanayo.strategy.lightning.block_logs import BlockLogs
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.setup.cube import Cube
from lightning_hanayo.strategy.setup.plan import recomputed_modules
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def build_stages(
    model: nn.Module,
    layout: Layout,
    ownership: Ownership,
    rank: int,
    *,
    cube: Cube | None,
    streams: RandomStreams | None,
    values: MadeValues,
    attributes: TemporaryAttributes,
    guard: ParameterGuard,
    options: Options,
) -> tuple[dict[int, Stage], UserStep | None]:
    """This rank's stages by number, and what runs the user's step, which is None above pipeline rank 0.

    The model has this rank's parameters, in a cube its shards of them, and placeholders elsewhere.
    """
    numbers = ownership.stages_of(rank)
    tied = TiedGradients(in_order=options.tied_gradients == "in_order")
    queues = {stage: WeightGradientQueue() for stage in numbers} | (cube.queues if cube is not None else {})
    is_single = len(ownership.stages) == 1  # a single stage runs the blocks where the user's code calls them
    if _splits_backward(layout) and not is_single:  # no rank waits for a single stage's input gradient
        keep = ownership.tied_parameters(model)
        for stage in numbers:
            linear_patch.patch_linear_layers(ownership.blocks(stage), queues[stage], keep=keep)
    stack = ownership.stack
    recompute(recomputed_modules(options.recompute, layout, ownership, rank))
    num_local = len(ownership.stages[0]) if cube is None else 0
    if streams is not None or not is_single:
        forward_patch.patch_blocks(stack.blocks, streams, values=values, num_local=num_local, single_stage=is_single)
    if not is_single:
        _keep_padding(model, attributes)
    carriers = NO_CARRIERS if is_single else _carriers(model, ownership, rank, num_local, cube)
    hooks = {stage: NoHooks() if cube is None else cube.stage_hooks(stage) for stage in numbers}
    stages: dict[int, Stage] = {
        stage: MiddleStage(blocks=ownership.blocks(stage), queue=queues[stage], hooks=hooks[stage], carriers=carriers)
        for stage in numbers
    }
    if 0 not in numbers:
        return stages, None
    sends_objects = cube is None or cube.keeps_layout
    replaced = ReplacedParameters(model)
    user_step = UserStep(stack.blocks, num_local, stack.name, streams, carriers, guard.step, sends_objects, replaced)
    if cube is None:
        return stages | _ends(ownership, user_step, queues, tied), user_step
    return stages | _sharded_ends(ownership, user_step, queues, tied, cube), user_step


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


def _carriers(model: nn.Module, ownership: Ownership, rank: int, num_local: int, cube: Cube | None) -> Carriers:
    """What carries values between the step and blocks on other ranks, besides the blocks' arguments."""
    stack, numbers = ownership.stack, ownership.stages_of(rank)
    own = {i for stage in numbers for i in ownership.stages[stage]}
    user_blocks = num_local if 0 in numbers else None
    alike = cube is None or cube.keeps_layout
    state = ModuleState(model, stack.blocks, stack.name)

    def accepts(key: str) -> bool:
        return cube is None or (alike and key != "hidden_states")  # in a cube the step calls the first block itself

    return Carriers(
        [
            StateCarrier(state, stack.blocks, own, user_blocks, has_tensors=alike),
            RecordedOutputs(model, accepts),
            BlockLogs(model, rejects=not alike),
        ]
    )


def _splits_backward(layout: Layout) -> bool:
    """Whether any backward is split; otherwise linear layers stay as they are."""
    rows = layout.table(layout.num_microbatches).actions
    return any(action.kind is Kind.W for row in rows for action in row)


def _keep_padding(model: nn.Module, attributes: TemporaryAttributes) -> None:
    """In evaluation `nn.TransformerEncoder` makes nested tensors of padded ones, which can't be sent. Values agree."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            attributes.set(module, "use_nested_tensor", False)

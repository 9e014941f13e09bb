"""The changes that runs have made to a module, and how it becomes whole again: in place, or in a copy on rank 0.

rank 0      embedding   block 0   .         .   head      a dot is a block of placeholders
rank 1      .           .         block 1   .   .         in a cube, each rank has shards of its own blocks

gather_model    one tensor after another is sent to all ranks, and rank 0 puts it into a copy of the module
restore_whole   ... and every rank puts it into the module: before a run with another layout
take_parts      between runs `load_state_dict` of the module takes whole values, of which each rank keeps its part

One rank's part in its cube: the ranks that hold each stage together by 3-D tensor parallelism.

setup       layers of the blocks become 3-D parallel, all other parameters are sharded over the cube
a batch     each rank runs user code on its share of it; parameters outside the stack are whole meanwhile
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing.load_state import own_parts_taken
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.errors import UnsupportedError, available
from lightning_hanayo.linear_modules import has_gradient_hooks
from lightning_hanayo.packed_values import stored_tensors
from lightning_hanayo.partial_values import PartialParameter
from lightning_hanayo.partition import guards
from lightning_hanayo.partition.ownership import Ownership, Placeholder, exchange
from lightning_hanayo.pipeline_parallel import split_backward
from lightning_hanayo.pipeline_parallel.capture import forward_patch
from lightning_hanayo.pipeline_parallel.object_collectives import all_gather_objects, broadcast_object
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import Stage, TensorParallelFirstStage
from lightning_hanayo.strategy.batch_split import BatchSplitter, ReplicatedSplitter, SharedSplitter
from lightning_hanayo.strategy.groups import CubeGroups, ProcessGroups, broadcast_bytes, broadcast_values
from lightning_hanayo.strategy.joining import on_all_ranks
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.tensor_parallel.boundary import MicrobatchReshard, ReplicatedReshard, SharedReshard
from lightning_hanayo.tensor_parallel.convert.parallelize import ParallelizePlan
from lightning_hanayo.tensor_parallel.outside_parameters import OutsideParameters, VocabularyWeight, vocabulary_weights
from lightning_hanayo.tensor_parallel.sharding import Shard, all_gather_whole, shards_of
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from lightning_hanayo.topology import Topology


class Cube:
    """Made once per module and layout: a second run finds the layers converted."""

    def __init__(self, groups: CubeGroups, plan: ParallelizePlan, options: Options, device: torch.device) -> None:
        self.plan = plan
        self._device = device
        self.mesh = groups.mesh
        self.queue = groups.queue
        """of the run that made the layers: theirs in later runs, too"""
        self._open_groups: CubeGroups | None = groups
        self._options = options
        self.shares_samples = options.cube_outside == "share"
        """whether each rank runs user code on samples of its own, unless the step runs once on a whole batch"""
        batch_dim = plan.batch_dim if plan.is_registered else options.batch_dim
        layout = self.mesh, plan.is_registered, batch_dim, plan.sequence_dim
        self.whole_boundary = self._boundary(ReplicatedReshard(*layout))
        """where user code runs on all ranks alike"""
        self.whole_splitter = ReplicatedSplitter(options.batch_rule, self.mesh, self.whole_boundary)
        self.boundary = self.whole_boundary
        self.splitter: BatchSplitter = self.whole_splitter
        if self.shares_samples:
            self.boundary = self._boundary(SharedReshard(*layout))
            self.splitter = SharedSplitter(options.batch_rule, self.mesh, self.boundary, self.all_gather)
        self.queues: dict[int, WeightGradientQueue] = {}
        self.outside = OutsideParameters(self.mesh)
        self._contexts: dict[int, StageContext] = {}
        self.shards: dict[Tensor, Shard] = {}
        """how the ranks hold each parameter, also those of copies of the model"""
        self._whole_in_steps: set[Tensor] = set()

    def parallelize(self, blocks: Mapping[int, Sequence[nn.Module]], parameters: Sequence[nn.Parameter]) -> None:
        """Shard the parameters of this rank's stages that aren't sharded yet. Called by all ranks of the cube.

        Args:
            blocks: of each stage, by its number.
            parameters: all that this rank holds.
        """
        for stage, own in blocks.items():
            if stage not in self._contexts:
                self._convert(stage, own)
        others = [p for p in parameters if p not in self.shards]
        self.outside.shard(others)
        for parameter in others:
            self.shards[parameter] = self.outside.shards.get(parameter, Shard((), "xyz"))
        self._whole_in_steps.update(others)

    def close(self) -> None:
        """The run has ended: refuse calls of the 3-D layers, which would wait for other ranks."""
        if self.queue is not None:
            self.queue.close()
        for context in self._contexts.values():
            context.closed = (
                f"a block with 3-D layers was called, but its run has ended: rank {self.mesh.index('xyz')} of the cube "
                f"{self.mesh.sizes} holds parts of its weights. {guards.WAY_OUT}"
            )

    def open(self) -> None:
        """The next run begins."""
        for context in self._contexts.values():
            context.closed = ""

    def disconnect(self) -> None:
        """After a failure: drop all process groups."""
        self._open_groups = None
        if self.queue is not None:
            self.queue.cancel()
            self.queue.close(timeout=0)
        self.mesh.disconnect(
            "the run of this model on a cube of ranks has failed. Build it anew, and load a checkpoint."
        )

    @property
    def keeps_layout(self) -> bool:
        """Whether tensors between a block's layers are as outside the stack: own samples, all features."""
        return self.shares_samples and not self.plan.is_registered

    def first_block(self, stage: Stage) -> partial[Any]:
        """Runs the first block of that stage in dry runs, on samples that all ranks of the cube have."""
        assert isinstance(stage, TensorParallelFirstStage)
        boundary = self.whole_boundary if self.plan.is_registered else self.boundary
        return partial(stage.run_first_block, self._boundary(boundary.reshard))

    def stage_hooks(self, stage: int) -> StageContext:
        """The hooks that run before each forward and backward of a stage's blocks."""
        return self._contexts.get(stage) or StageContext(self.mesh)

    def drop_transfers(self) -> None:
        """After a failure, when the process groups have been left: free what was under way."""
        for context in self._contexts.values():
            context.drop_transfers()

    def num_replicas(self, parameter: Tensor) -> int:
        """How many ranks of the cube hold the same shard of it."""
        return self.shards[parameter].replicas(self.mesh)

    def replica(self, parameter: Tensor) -> int:
        """This rank's number among those that hold the same shard of it."""
        axes = self.shards[parameter].axes
        return self.mesh.index("".join(axis for axis in "xyz" if axis not in axes))

    def region(self, parameter: Tensor) -> Region:
        """Which entries of the whole parameter this rank holds."""
        dims = self.shards[parameter].dims
        return Region.of_entries(
            range(*dim.span(self.mesh)) if dim.order is None else dim.entries_at(self.mesh).tolist() for dim in dims
        )

    @property
    def whole_shapes(self) -> dict[Tensor, tuple[int, ...]]:
        """The shapes of the parameters of which this rank holds a part."""
        return {parameter: shard.shape for parameter, shard in self.shards.items() if self.mesh.size(shard.axes) > 1}

    def own_rows(self, num_samples: int) -> int:
        """On how many of the samples of a whole batch generic blocks work here."""
        return self.whole_boundary.shares_of(num_samples)[self.mesh.index("xyz")].size

    def undo_in_copy(self, block: nn.Module, copied: nn.Module) -> dict[Tensor, tuple[int, ...]]:
        """Give the copy of a block its own layers again; return the whole shapes of the model's parameters."""
        self.plan.undo(dict(zip(block.modules(), copied.modules(), strict=True)))
        return self.whole_shapes

    def keep_vocabulary(self, modules: Iterable[nn.Module]) -> None:
        """Keep embeddings and heads among `modules` sharded while batches run. Steps must run on all ranks alike."""
        weights = [weight for weight in vocabulary_weights(modules) if weight in self.outside.shards]
        self.outside.kept_sharded = set(weights) if self.mesh.num_ranks > 1 else set()

    @property
    def parts_in_steps(self) -> Mapping[Tensor, type[nn.Parameter]]:
        """The parameters that user code can't use in a step as it is: values are parts, or gradients aren't summed.

        And the class that each has meanwhile.
        """
        parts = {one: PartialParameter for one in self.shards if one not in self._whole_in_steps}
        return parts | dict.fromkeys(self.outside.kept_sharded, VocabularyWeight)

    def unshard(self, part: Tensor, parameter: Tensor) -> Tensor:
        """Gather the ranks' shards of something shaped as `parameter`, on the CPU. Called by all of them."""
        shard = self.shards[parameter]
        if tuple(part.shape) != shard.local_shape(self.mesh) or not shard.axes:
            return part.detach().cpu()
        on_device = part.detach().to(self._device)  # after a run Lightning has moved it to the CPU
        return all_gather_whole(on_device, shard, self.mesh, torch.device("cpu"))

    def shard(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """This rank's shard of something shaped as the whole parameter; else all of it."""
        shard = self.shards.get(parameter)
        if shard is None or tuple(whole.shape) != shard.shape or not shard.axes:
            return whole
        return shard.of(whole, self.mesh)

    @property
    def _groups(self) -> CubeGroups:
        return available(self._open_groups, "process groups exist until a run has failed")

    def all_gather(self, value: Any) -> list[Any]:
        """Gather Python objects from all ranks of the cube, which call this."""
        return all_gather_objects(self._groups.whole, value, self.mesh.axis("xyz").group)

    def _boundary(self, reshard: SharedReshard | ReplicatedReshard) -> MicrobatchReshard:
        return MicrobatchReshard(
            reshard, lambda value: all_gather_objects(self._groups.plane, value), lambda value: self.all_gather(value)
        )

    def _convert(self, stage: int, blocks: Sequence[nn.Module]) -> None:
        queue = self.queues[stage] = WeightGradientQueue()
        context = self._contexts[stage] = StageContext(
            self.mesh,
            self._options.cube_memory,
            queue,
            num_pieces=self._options.cube_pieces,
            keep_weights=self._options.cube_weights == "batch",
            turns=None if self.queue is None else self.queue.turns,
        )
        self.plan.install(blocks, context)
        for module in (part for block in blocks for part in block.modules()):
            self.shards.update({module._parameters[name]: shard for name, shard in shards_of(module).items()})  # type: ignore[misc]


_Module = TypeVar("_Module", bound=nn.Module)

_ATTRIBUTE = "_hanayo_prepared_model"
_OF_GUARDS = ("_owner", "_part", "_own_class")


@dataclass
class PreparedModel:
    """The cut and the 3-D layers of a module. Runs of the same layout reuse them, also those of another Trainer."""

    stage_blocks: list[range] | None = None
    """the blocks of each stage; None before the first run"""
    stage_shares: tuple[float, ...] | None = None
    """of the model's time; None: about equal ones"""
    cube: Cube | None = None
    """None before the first run, and without a cube"""
    made_for: tuple[Topology, Options] | None = None
    """None before the first run, and for a copy of a module"""
    ownership: Ownership | None = None
    groups: ProcessGroups | None = None
    """of the ranks that hold the module together; None also after a failure"""
    is_lost: bool = False
    """whether a run has failed, so that ranks may be at different steps, and can't be reached any more"""
    names: dict[Tensor, str] = field(default_factory=dict)
    """of the parameters that the module has, and of those that it had"""
    between_runs: TemporaryAttributes = field(default_factory=TemporaryAttributes)
    """of the module, and of those in it"""
    num_loads: int = 0
    """how often the script has loaded values into the module on this rank, between runs"""

    @staticmethod
    def of(module: nn.Module) -> "PreparedModel":
        """The changes of earlier runs to the module; without any a new one, which the module doesn't know yet."""
        prepared: PreparedModel = vars(module).get(_ATTRIBUTE) or PreparedModel()
        return prepared

    def __reduce__(self) -> Any:
        """Copies of a module keep the cut; the ranks of a cube and their connections can't be copied."""
        return PreparedModel, (self.stage_blocks, self.stage_shares, None, None, None, None, self.is_lost)

    def attach(self, module: nn.Module, topology: Topology, options: Options, groups: ProcessGroups) -> None:
        """Called before the module is cut: from now on it isn't whole on this rank."""
        object.__setattr__(module, _ATTRIBUTE, self)
        self.made_for, self.groups = (topology, options), groups

    def lose(self, module: nn.Module) -> None:
        """After a failure: drop the process groups, and forget a module that is still whole."""
        self.groups, self.is_lost = None, self.ownership is not None
        if self.cube is not None:
            self.cube.disconnect()
        if not self.is_lost:
            vars(module).pop(_ATTRIBUTE, None)

    def fits(self, module: nn.Module, topology: Topology, options: Options) -> bool:
        """Whether a run on this layout can take the module as it is."""
        if self.made_for is None:
            return True
        if self.ownership is not None and self.is_outdated(module):
            return False
        return self.made_for == (topology, options) and (self.cube is None or self._has_connections)

    def is_outdated(self, module: nn.Module) -> bool:
        """Whether the module has other parameters, or under other names, than when it was cut."""
        return any(self.names.get(parameter) != name for name, parameter in module.named_parameters())

    def adopt(self, module: nn.Module, device: torch.device, pipe_rank: int) -> bool:
        """Take in the parameters that a hook has given the module, with rank 0's values; return whether there are some.

        Called by all ranks of the world. A copy is left out where it belongs to a rank that has a part or nothing of
        what was copied.

        Raises:
            UnsupportedError: on all ranks: they have made different ones, or one where a block computes with parts.
        """
        ownership, now = available(self.ownership, "the module is cut"), dict(module.named_parameters())
        blocks = tuple(f"{name}." for name in ownership.stack.block_names)

        def described() -> dict[tuple[str, tuple[int, ...], str], tuple[bool, bool]]:
            """Of each parameter that is new or renamed, whether it is whole here, and whether it needn't be."""
            if self.made_for is not None:  # otherwise each rank holds the whole model
                ownership.stack.check_in(module)
            is_registered = self.cube is not None and self.cube.plan.is_registered
            owners, changed = ownership.rank_by_name(module), {}
            for name, one in now.items():
                if self.names.get(one) != name:
                    is_whole = not one.is_meta and not isinstance(one, PartialParameter)
                    needs_none = one in self.names or owners[name] != pipe_rank
                    changed[name, tuple(one.shape), str(one.dtype)] = is_whole, needs_none
                    if is_registered and not needs_none and name.startswith(blocks):
                        raise UnsupportedError(
                            f"{name} was made in a block whose layers are 3-D parallel, where it would compute with "
                            f"parts of the features. Make it before training begins: in setup or configure_model."
                        )
            return changed

        first, *others = on_all_ranks(described)
        for rank, other in enumerate(others, 1):
            if different := sorted(first.keys() ^ other.keys()):
                raise UnsupportedError(
                    f"{different[0][0]} {list(different[0][1])} was made on one of the ranks 0 and {rank} alone, by a "
                    "hook or a step. Make parameters in hooks that run on all ranks, such as on_train_epoch_start."
                )
        adopted = {key[0]: now[key[0]] for key in first if all(any(rank[key]) for rank in (first, *others))}
        if others:
            whole = [now[key[0]] for key in first if all(rank[key][0] for rank in (first, *others))]
            new = (parameter for parameter in whole if parameter not in self.names)
            broadcast_values((stored for parameter in new for stored in stored_tensors(parameter)), device)
        for old, name in self.names.items():
            while name in adopted and adopted[name] is not old:  # optimizers may still have it
                name += " (replaced)"
            self.names[old] = name
        self.names.update({parameter: name for name, parameter in adopted.items()})
        return bool(adopted)

    def check(self, module: nn.Module) -> None:
        """Check that no run of the module has failed.

        Raises:
            UnsupportedError: one has.
        """
        if self.is_lost:
            self._refuse(module)

    def take_parts(self, module: nn.Module) -> None:
        """After a run: let scripts load whole values into the module, or into one in it."""
        for one in module.modules():
            self.between_runs.wrap(one, "load_state_dict", partial(self._load, one))

    def _load(self, module: nn.Module, load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Takes the place of `load_state_dict`. No rank waits for another."""
        self.check(module)
        if kwargs.get("assign") or True in args[2:]:
            raise UnsupportedError(
                f"load_state_dict(assign=True) would make whole tensors the parameters of this "
                f"{type(module).__name__}, of which each rank holds a part. Leave out assign: values are copied."
            )
        self.num_loads += 1
        with guards.released(module), own_parts_taken(module, self.cube):
            return load(*args, **kwargs)

    def check_loads(self) -> None:
        """Check that a script has loaded values on all ranks, or on none. Called by all ranks of the world.

        Raises:
            UnsupportedError: on all ranks.
        """
        counts = on_all_ranks(lambda: self.num_loads)
        if len(set(counts)) > 1:
            most, fewest = counts.index(max(counts)), counts.index(min(counts))
            error = UnsupportedError(
                f"rank {most} has called load_state_dict between runs {counts[most]} times, but rank {fewest} "
                f"{counts[fewest]} times: its parts of the module have other values. Call it on all ranks."
            )
            error.is_common = True
            raise error

    @property
    def _has_connections(self) -> bool:
        """Whether the process groups still exist: a failed run of another module has ended all."""
        try:
            return self.groups is not None and bool(dist.get_process_group_ranks(self.groups.control))
        except (KeyError, ValueError):
            return False

    def _refuse(self, module: nn.Module) -> NoReturn:
        raise UnsupportedError(
            f"each rank holds a part of this {type(module).__name__}, whose connections are closed since a run has "
            "failed, maybe at different steps of the ranks. Build it anew, and load a checkpoint."
        )

    def gather_model(self, module: _Module, attributes: TemporaryAttributes, *, is_wanted: bool) -> _Module | None:
        """A whole, ordinary copy of the module, on the CPU, where it `is_wanted`. Called by all ranks of the model.

        Args:
            module: as this rank has it.
            attributes: of the module, set by a run under way.
            is_wanted: elsewhere one tensor at a time is in memory.

        Raises:
            UnsupportedError: the module can't be copied, or a run of it has failed.
        """
        self.check(module)
        with guards.released(module):
            whole = {name: tensor for name, tensor in self._whole_tensors(module) if is_wanted}
            if not is_wanted:
                return None
            with attributes.suspended(), self.between_runs.suspended():
                copied = _copy_with(whole, module)
        # Take away the changes of a run under way, and of the first one, to the blocks.
        vars(copied).pop(_ATTRIBUTE, None)
        forward_patch.unpatch_blocks(list(copied.modules()))
        split_backward.unpatch_linear_layers([copied])
        if self.cube is not None:
            self.cube.plan.undo(dict(zip(module.modules(), copied.modules(), strict=True)))
        return copied.cpu()

    def restore_whole(self, module: nn.Module) -> None:
        """Make the module whole on every rank, as before its first run, with the values of now.

        Called by all ranks of the world, in no run. Every rank needs memory for the whole model.

        Raises:
            UnsupportedError: a parameter has a hook, which only the rank knows that has held it.
        """
        tensors = dict(module.named_parameters())
        hooked = [name for name, parameter in tensors.items() if has_gradient_hooks(parameter)]
        if hooked:
            raise UnsupportedError(
                f"{hooked[0]} has a hook, which other ranks have lost, so that it can't be trained on another layout "
                f"than before. Train what trainer.strategy.gather_model() returns, after setting its hooks."
            )
        new = [name for name, parameter in tensors.items() if parameter not in self.names]
        if copied := [name for name in new if isinstance(tensors[name], Placeholder | PartialParameter)]:
            raise UnsupportedError(
                f"{copied[0]} was copied from a parameter of which this rank has a part or nothing. Delete it before "
                f"the next run, or make it again from what trainer.strategy.gather_model() returns."
            )
        for name, whole in self._whole_tensors(module):
            parameter = tensors.get(name)
            if parameter is None:
                _set_buffer(module, name, whole)
            elif isinstance(parameter, Placeholder):
                exchange(parameter, _parameter_like(parameter, whole))
            else:
                parameter.data, parameter.grad = whole, None
                for attribute in _OF_GUARDS:
                    vars(parameter).pop(attribute, None)
        if self.cube is not None:
            self.cube.plan.undo()
        vars(module).pop(_ATTRIBUTE)

    def _whole_tensors(self, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yields all parameters and buffers with their names, whole, each in CPU memory of its own."""
        tensors = dict(chain(module.named_parameters(), module.named_buffers(remove_duplicate=False)))
        if self.ownership is None:  # nothing is cut
            yield from ((name, _to_cpu(tensor)) for name, tensor in tensors.items())
            return
        owners = self.ownership.rank_by_name(module)
        owners.update({name: 0 for name, one in module.named_parameters() if one not in self.names})
        if not self._has_connections:
            self._refuse(module)
        shapes = {} if self.cube is None else self.cube.whole_shapes
        control = available(self.groups, "a run has set them").control
        for owner in range(control.size()):
            is_mine = owner == control.rank()
            own = {name: tensor for name, tensor in tensors.items() if owners[name] == owner} if is_mine else {}
            specs = [(name, shapes.get(tensor, tuple(tensor.shape)), tensor.dtype) for name, tensor in own.items()]
            for name, shape, dtype in broadcast_object(specs, control, owner):
                if not is_mine:
                    whole = torch.empty(shape, dtype=dtype)
                elif self.cube is not None and own[name] in shapes:
                    whole = self.cube.unshard(own[name], own[name]).contiguous()
                else:
                    whole = _to_cpu(own[name])
                if control.size() > 1:
                    broadcast_bytes(whole, control, owner)
                yield name, whole


def _copy_with(whole: dict[str, Tensor], module: _Module) -> _Module:
    """Copy the module with these parameters and buffers."""
    parameters, memo = dict(module.named_parameters()), dict[int, Any]()
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for name, tensor in whole.items():
        if name in parameters:
            memo[id(parameters[name])] = _parameter_like(parameters[name], tensor)
        elif name in buffers:
            memo[id(buffers[name])] = tensor
    for value in (value for part in module.modules() for value in vars(part).values()):
        if isinstance(value, Tensor) and value.grad_fn is not None:
            memo[id(value)] = value.detach().clone()  # stored by a step; it can't be copied with its graph
    try:
        copied = copy.deepcopy(module, memo)
    except Exception as error:
        raise UnsupportedError(
            f"gather_model can't copy this {type(module).__name__} ({type(error).__name__}: {error}). Remove what "
            f"can't be copied from its attributes, or call trainer.save_checkpoint(path), and load that into a new one."
        ) from error
    for name in whole.keys() - parameters.keys() - buffers.keys():
        _set_buffer(copied, name, whole[name])
    return copied


def _parameter_like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter with these values, and the attributes that the user has set on `parameter`."""
    made = nn.Parameter(data, parameter.requires_grad)
    vars(made).update({name: value for name, value in vars(parameter).items() if name not in _OF_GUARDS})
    return made


def _set_buffer(module: nn.Module, name: str, value: Tensor) -> None:
    path, _, key = name.rpartition(".")
    module.get_submodule(path)._buffers[key] = value


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()

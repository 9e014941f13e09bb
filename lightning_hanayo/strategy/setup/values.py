"""Initial values: of models that were built on the meta device, and from folders of safetensors.

On the meta device: each rank builds the modules of its stages, one after another, and in a cube keeps its shards.

From folders:

plan     from headers and names, alike on all ranks, before the model is cut: a missing or unfit tensor is an error
load     each rank reads and converts its tensors, in a cube its shards; then all ranks hear of an error that one had

Whole tensors of parameters, for user code, and the way of their gradients back to the ranks that hold the parameter.

    rank 0   on_train_batch_start     training_step              the batch's end
             w = full_parameter(p)    loss += w.square().sum()   w.grad, summed over the cube --+
    rank 2   w = full_parameter(p)    -                          p.grad += its part of it  <----+

User code issues no collective in its backward: a whole tensor is a leaf, whose gradient is sent at the batch's end.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn

from lightning_hanayo.dist_checkpointing import huggingface
from lightning_hanayo.dist_checkpointing.export import Weights, open_weights
from lightning_hanayo.dist_checkpointing.load_state import own_part, tensors_of
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor
from lightning_hanayo.errors import HanayoError, UnsupportedError, listed, nearest
from lightning_hanayo.partition.deferred_init import DeferredInit, DeferredModule
from lightning_hanayo.partition.ownership import Placeholder
from lightning_hanayo.strategy.groups import broadcast_bytes
from lightning_hanayo.strategy.joining import on_all_ranks, place_in_world, with_common_errors
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.setup.prepared_model import Cube
from lightning_hanayo.weight_gradients import gradient_dtype


def fill_initial_values(
    deferred: DeferredInit, modules: Iterable[nn.Module], device: torch.device, cube: Cube | None
) -> None:
    """Fill meta tensors in `modules`, this rank's, with its shards of the values, one whole module after another."""

    def own_values(module: DeferredModule) -> Iterator[Tensor]:
        for value, tensor in zip(deferred.initial_values(module), module.tensors, strict=True):
            yield (value if cube is None else cube.shard(value, tensor)).to(device)

    for module in deferred.deferred_modules(modules):
        deferred.assign(module, own_values(module))


def make_room(
    deferred: DeferredInit, model: nn.Module, modules: Iterable[nn.Module], names: Collection[str], device: torch.device
) -> None:
    """Give memory to meta tensors in `modules`, this rank's, that have one of the names: values are read later."""
    own = {tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())}
    for name, tensor in tensors_of(model).items():
        if name in names and tensor in own and tensor.is_meta:
            deferred.assign_one(tensor, torch.empty_like(tensor, device=device))


_WAS_READ = "_hanayo_was_read"
_CONVERTIBLE = frozenset((torch.float64, torch.float32, torch.float16, torch.bfloat16))


@dataclass(frozen=True)
class FolderPlan:
    """The tensors that a model takes from one folder. Equal on all ranks."""

    folder: Weights
    module: str
    """the qualified name of the module that takes it"""
    sources: Mapping[str, str | huggingface.Merge]
    """the name in the folder of each tensor of the model that takes its value, by its qualified name there"""
    missing: tuple[str, ...]
    """tensors of the module that the folder lacks: parameters outside the blocks, and buffers"""
    unused: tuple[str, ...]


@dataclass(frozen=True)
class Reading:
    """The values that one rank has read."""

    num_bytes: int = 0
    seconds: float = 0.0
    conversions: frozenset[str] = frozenset()
    """such as: bfloat16 to float32"""
    replaced: str = ""
    """a parameter that had values before"""


def was_read(model: nn.Module) -> bool:
    """Whether an earlier run, maybe of another Trainer, has read the model's values, which it has trained since."""
    return _WAS_READ in vars(model)


def plan_pretrained(model: nn.Module, blocks: str, folders: Mapping[str, Path]) -> list[FolderPlan]:
    """Plan which tensors a whole model takes from folders. Needs no process group.

    Args:
        model: with or without values.
        blocks: the qualified name of its block stack.
        folders: by the qualified name of the module that they are for; "": the module whose names fit.

    Raises:
        HanayoError: a folder can't be read, or its tensors don't fit the model.
    """
    return [_plan(model, blocks, name, open_weights(path)) for name, path in folders.items()]


def check_same_folders(folders: Iterable[Path], *, verify: bool) -> None:
    """Check that all ranks see the same tensors in the folders. Called by all ranks of the world.

    Args:
        verify: whether the hashes of checkpoint folders are checked, each byte by one rank.

    Raises:
        HanayoError: on all ranks, if one sees other tensors, or can't read a folder.
    """
    paths = list(folders)
    signatures = on_all_ranks(lambda: [open_weights(path).folder.signature for path in paths])
    for rank, row in enumerate(signatures):
        for path, own, first in zip(paths, row, signatures[0], strict=True):
            if own != first:
                raise HanayoError(
                    f"init_from: rank {rank} finds other tensors in {path} than rank 0. Give a folder on a file "
                    f"system that all ranks see, or the same files on each node."
                )
    for path in paths if verify else ():
        with_common_errors(partial(open_weights(path).folder.verify, *place_in_world(), kind="model/"))


def load_pretrained(
    plans: Sequence[FolderPlan],
    model: nn.Module,
    modules: Iterable[nn.Module],
    deferred: DeferredInit | None,
    device: torch.device,
    cube: Cube | None,
) -> Reading:
    """Read the values of this rank's `modules`, in a cube its shards of them.

    Raises:
        HanayoError: a file can't be read any more, or has two values for one parameter.
    """
    own = {tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())}
    values = {name: tensor for name, tensor in huggingface.named_values(model) if tensor in own}
    given: set[Tensor] = set()
    num_bytes, start, conversions, replaced = 0, time.perf_counter(), set(), ""
    for name, source, whole in _own_sources(plans, values):
        tensor = values[name]
        part = own_part(whole, tensor, cube)
        num_bytes += (part if isinstance(source, str) else whole).nbytes
        if part.dtype != tensor.dtype:
            conversions.add(f"{part.dtype} to {tensor.dtype}".replace("torch.", ""))
        value = (part.read() if isinstance(part, StoredTensor) else part).to(device=device, dtype=tensor.dtype)
        if tensor in given:
            if not torch.equal(tensor.detach(), value):
                raise HanayoError(
                    f"init_from: {name} shares its parameter with another name, but the folder has another value for "
                    f"{huggingface.names_of(source)[0]}. Build it with tie_word_embeddings=False."
                )
        elif tensor.is_meta:
            assert deferred is not None
            deferred.assign_one(tensor, value)
        else:
            tensor.detach().copy_(value)
            replaced = replaced or name
        given.add(tensor)
    return Reading(num_bytes, time.perf_counter() - start, frozenset(conversions), replaced)


def load_on_all_ranks(plans: Sequence[FolderPlan], model: nn.Module, load: Callable[[], Reading]) -> None:
    """Load this rank's part, and say on rank 0 how much all have read. Called by all ranks of the world.

    Raises:
        HanayoError: on all ranks, if one couldn't read its part.
    """
    readings = on_all_ranks(load)
    object.__setattr__(model, _WAS_READ, True)
    _warn(plans, readings)
    rank_zero_info(_report(plans, readings))


def _plan(model: nn.Module, blocks: str, name: str, folder: Weights) -> FolderPlan:
    modules = dict(model.named_modules())
    if name not in modules:
        raise HanayoError(f"init_from: {type(model).__name__} has no module {name!r}; {nearest(name, modules)}")
    match = huggingface.match_names(modules[name], folder.tensors, folder.path)
    prefix = huggingface.joined(name, match.prefix)
    values = {huggingface.joined(prefix, key): tensor for key, tensor in huggingface.named_values(modules[prefix])}
    sources = {huggingface.joined(prefix, key): source for key, source in match.sources.items()}
    _check_fit(folder, sources, values)
    given = {values[key] for key in sources}
    missing = {tensor: key for key, tensor in reversed(values.items()) if tensor not in given}
    _check_blocks(folder, blocks, missing)
    return FolderPlan(folder, prefix, sources, tuple(reversed(missing.values())), tuple(match.unused(folder.tensors)))


def _check_fit(folder: Weights, sources: Mapping[str, str | huggingface.Merge], values: Mapping[str, Tensor]) -> None:
    shapes, dtypes = [], []
    for name, source in sources.items():
        first, *_ = huggingface.names_of(source)
        stored, tensor = folder.tensors[first], values[name]
        if stored.dtype != tensor.dtype and not {stored.dtype, tensor.dtype} <= _CONVERTIBLE:
            dtypes.append(f"{name} is {tensor.dtype}, but {first} in the folder {stored.dtype}")
        elif (shape := _shape(folder, source)) != tuple(tensor.shape):
            shapes.append(f"{name} is {tuple(tensor.shape)}, but {first} in the folder {shape}")
    if shapes:
        raise HanayoError(
            f"init_from: shapes differ from {folder.path}: {listed(shapes)}. Build the model of the folder's "
            f"config.json. To change sizes (resize_token_embeddings), do it once in one process, and save the result."
        )
    if dtypes:
        raise UnsupportedError(
            f"init_from: {folder.path} has dtypes that aren't converted, such as those of quantized weights: "
            f"{listed(dtypes)}. Give a folder with floating-point weights."
        )


def _shape(folder: Weights, source: str | huggingface.Merge) -> tuple[int, ...]:
    if isinstance(source, str):
        return tuple(folder.tensors[source].shape)
    return tuple(
        source.of({n: torch.empty(folder.tensors[n].shape, device="meta") for n in huggingface.names_of(source)}).shape
    )


def _check_blocks(folder: Weights, blocks: str, missing: Mapping[Tensor, str]) -> None:
    in_blocks = [n for tensor, n in missing.items() if isinstance(tensor, nn.Parameter) and n.startswith(f"{blocks}.")]
    if in_blocks:
        raise HanayoError(
            f"init_from: {folder.path} has no values for parameters of blocks: {listed(in_blocks[::-1])}. Build the "
            "model of its config.json, or save yours with safetensors.torch.save_model, and give that folder."
        )


def _own_sources(
    plans: Sequence[FolderPlan], values: Mapping[str, Tensor]
) -> Iterator[tuple[str, str | huggingface.Merge, Tensor]]:
    """Of each value that this rank holds: a name, its source, and the whole tensor, which is read only if merged."""
    for plan in plans:
        tensors, given = plan.folder.tensors, set[tuple[str, Tensor]]()
        for name, source in plan.sources.items():
            if name not in values:
                continue
            if not isinstance(source, str):
                yield name, source, source.of({one: tensors[one].read() for one in huggingface.names_of(source)})
            elif (source, values[name]) not in given:  # else another name of the same parameter
                given.add((source, values[name]))
                yield name, source, tensors[source]


def _warn(plans: Sequence[FolderPlan], readings: Sequence[Reading]) -> None:
    for plan in plans:
        if plan.missing:
            rank_zero_warn(
                f"init_from: {plan.folder.path} has no values for {listed(plan.missing)}: initial values are kept."
            )
        if plan.unused:
            rank_zero_warn(
                f"init_from: {plan.folder.path} has {listed(plan.unused)}, for which {plan.module or 'the model'} has "
                f"no parameter."
            )
    if readings[0].replaced and len(readings) > 1:
        rank_zero_warn(
            f"init_from: {readings[0].replaced} and others had values on every rank before, so init_from has saved no "
            f"memory. Build the model in configure_model, where each rank creates only what it holds."
        )


def _report(plans: Sequence[FolderPlan], readings: Sequence[Reading]) -> str:
    sizes, seconds = [one.num_bytes for one in readings], [one.seconds for one in readings]
    taken = ", ".join(f"{plan.module or 'the model'} from {plan.folder.path}" for plan in plans)
    read = f"{min(sizes) / 1e6:.1f} to {max(sizes) / 1e6:.1f} MB in {min(seconds):.2f} to {max(seconds):.2f} s"
    conversions = sorted(set().union(*(one.conversions for one in readings)))
    return f"init_from: {taken}. A rank has read {read}" + "".join(f", converted from {one}" for one in conversions)


@dataclass(frozen=True)
class _Leaf:
    """A whole tensor that the batch's steps may use. `is_everywhere`: whether all pipeline ranks know of it."""

    parameter: nn.Parameter
    whole: Tensor
    is_everywhere: bool


@dataclass(eq=False, repr=False)
class FullParameters:
    """Gathers parameters for user code of one run."""

    run: Run
    """of the Trainer"""
    parameters: InitVar[Mapping[str, nn.Parameter]]
    """all of the model, by qualified name"""
    owners: Mapping[str, int]
    """the pipeline rank of each"""
    cube: Cube | None
    """None without one"""

    def __post_init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        self._leaves: dict[Tensor, _Leaf] = {}
        self._batch = 0

    def get(self, parameter: Tensor) -> Tensor:
        """The whole of `parameter`. See `HanayoStrategy.full_parameter`."""
        if parameter not in self._names:
            raise HanayoError(
                f"full_parameter takes a parameter of the LightningModule, such as those of self.parameters(); got "
                f"{type(parameter).__name__}"
            )
        assert isinstance(parameter, nn.Parameter)
        guard = self.run.guard
        scope, hook = guard.scope, guard.hook_name
        if scope in ("step", "alone") and isinstance(parameter, Placeholder):
            name = self._names[parameter]
            raise UnsupportedError(
                f"full_parameter was called in {hook or 'a step'} for {name}, which is on pipeline rank "
                f"{self.owners[name]}. Call it in a hook that runs on all ranks: for steps in on_train_batch_start."
            )
        with guard.off():
            if scope == "step":
                return self._in_step(parameter)
            if scope == "alone":
                return self._gathered(parameter)
            return self._in_hook(parameter, keeps_gradient=hook == "on_train_batch_start")

    def end_batch(self, *, reduce: bool) -> None:
        """Add the gradients of whole tensors to those of the parameters, where they are. Called by all ranks.

        `reduce` says whether the gradients are summed over the data ranks in this batch.
        """
        leaves, self._leaves = list(self._leaves.values()), {}
        self._batch += 1
        if leaves and torch.is_grad_enabled():
            used = self._used(leaves, reduce=reduce)
            for leaf, is_used in zip(leaves, used, strict=True):
                if is_used:
                    self._add(leaf, reduce=reduce)
                leaf.whole.grad = None  # user code may keep the leaf

    def forget(self) -> None:
        """Drop all whole tensors, after a failure."""
        self._leaves = {}

    # whole tensors

    def _in_step(self, parameter: nn.Parameter) -> Tensor:
        if parameter in self._leaves:
            return self._leaves[parameter].whole
        if self.cube is None or parameter not in self.cube.parts_in_steps:
            return parameter
        return self._new_leaf(parameter, self._gathered(parameter), is_everywhere=False)

    def _in_hook(self, parameter: nn.Parameter, *, keeps_gradient: bool) -> Tensor:
        is_missing, owner = self.run.topology.pipe > 1, self.owners[self._names[parameter]]
        if keeps_gradient and not is_missing and self.cube is None:
            return parameter
        is_here = owner == self.run.pipe_rank
        whole = self._gathered(parameter) if is_here else torch.empty_like(parameter, device="cpu")
        if is_missing:
            whole = whole.cpu().contiguous()
            broadcast_bytes(whole, self.run.groups.control, owner)
            whole = whole.to(self.run.device)
        return self._new_leaf(parameter, whole, is_everywhere=True) if keeps_gradient else whole

    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        """The whole of a parameter of this pipeline rank, in memory of its own."""
        whole, cube = parameter.detach(), self.cube
        if cube is not None and not cube.outside.is_whole(parameter):
            whole = cube.unshard(whole, parameter)
        return whole.to(parameter.device, copy=True)

    def _new_leaf(self, parameter: nn.Parameter, whole: Tensor, *, is_everywhere: bool) -> Tensor:
        self._leaves[parameter] = _Leaf(parameter, whole, is_everywhere)
        if parameter.requires_grad and torch.is_grad_enabled():
            whole.grad_dtype = gradient_dtype(parameter)
            whole.requires_grad_().register_hook(partial(self._check_is_new, self._names[parameter], self._batch))
        return whole

    def _check_is_new(self, name: str, batch: int, _: Tensor) -> None:
        if batch != self._batch:
            raise UnsupportedError(
                f"the loss uses what full_parameter returned for {name} in an earlier batch, whose values are old and "
                f"whose gradient would be lost. Call it again in each on_train_batch_start."
            )

    # gradients

    def _used(self, leaves: list[_Leaf], *, reduce: bool) -> list[bool]:
        """Which leaves have a gradient, on any rank whose gradients are summed."""
        own = [int(leaf.whole.grad is not None) for leaf in leaves]
        run = self.run
        if run.pipe_rank == 0 and self.cube is not None:
            own = self.cube.mesh.largest(own)
        counts = torch.tensor(own)
        everywhere = torch.tensor([leaf.is_everywhere for leaf in leaves])
        if run.topology.pipe > 1 and everywhere.any():
            known = counts[everywhere]
            dist.broadcast(known, group=run.groups.control, group_src=0)
            counts[everywhere] = known
        if reduce and run.groups.data_control is not None:
            dist.all_reduce(counts, group=run.groups.data_control)
        return [bool(count) for count in counts.tolist()]

    def _add(self, leaf: _Leaf, *, reduce: bool) -> None:
        owner, rank = self.owners[self._names[leaf.parameter]], self.run.pipe_rank
        gradient = leaf.whole.grad
        if gradient is None:
            gradient = torch.zeros_like(leaf.whole, dtype=gradient_dtype(leaf.parameter))
        if rank == 0 and self.cube is not None:
            gradient = self.cube.mesh.axis("xyz").all_reduce(gradient.contiguous()).wait()
        if owner != 0:  # then all pipeline ranks know of the leaf
            sent = gradient.detach().cpu().contiguous()
            broadcast_bytes(sent, self.run.groups.control)
            gradient = sent.to(gradient.device)
        if rank == owner:
            self._accumulate(leaf.parameter, gradient, reduce=reduce)

    def _accumulate(self, parameter: nn.Parameter, gradient: Tensor, *, reduce: bool) -> None:
        part, data = gradient if self.cube is None else self.cube.shard(gradient, parameter), self.run.groups.data
        if reduce and data is not None:
            dist.all_reduce(part, group=data)
        if not reduce and self.run.mesh.index(self.run.shard_of(parameter).partial) > 0:
            return  # a later batch sums the ranks' gradients of this parameter, so one of them adds it
        parameter.grad = part if parameter.grad is None else parameter.grad.add_(part)

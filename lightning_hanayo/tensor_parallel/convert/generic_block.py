"""Gives the code of a generic block whole parameters where it computes with those of a 3-D layer itself.

    W [8, 4] on two ranks, [4, 4] each     x @ self.up.weight            the ranks gather W for this one use; the
                                                                         backward sums its gradient over them
                                           self.up.weight.shape          (8, 4), without communication
                                           self.up.weight.clamp_(0)      on each rank's part, as on the whole
                                           self.up.weight[0].zero_()     refused: other changes in place

DoRA and Mamba do it. For the time of the block's forward these parameters have a class of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
import torch._functorch.vmap
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partial_values import (
    METADATA,
    PartialParameter,
    PartialValues,
    compute_on_parts,
    in_place_target,
    name_of,
    plain_alias,
)
from lightning_hanayo.tensor3d.call_order import END
from lightning_hanayo.tensor3d.layers.linear import ShardedLinear
from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.tensor3d.sharding import Shard, all_gather_whole, reduce_scatter_whole
from lightning_hanayo.tensor3d.stage_context import StageContext
from lightning_hanayo.versions import version_of
from lightning_hanayo.weight_gradients import gradient_dtype

_ORIGINAL = "_forward_with_parts"
_ALIASES = ("data", "detach")
_OF_THE_PART = (
    "grad", "autograd.grad", "data_ptr", "const_data_ptr", "untyped_storage", "__dlpack__", "__reduce_ex__",
)  # fmt: skip


@dataclass(eq=False)
class _Source:
    """Where the whole of a parameter comes from: its layer number in the stage's `context`, and how it is sharded."""

    context: StageContext
    number: int
    shard: Shard
    gathered: list[tuple[Tensor, int]] = field(default_factory=list)
    """by this run of the block's forward, each with its version"""

    def gather(self, part: Tensor) -> Tensor:
        """Called by all ranks of the mesh."""
        self.context.call_order.check(self.number)
        whole: Tensor = _GatherWhole.apply(part, self.shard, self.context.mesh)
        self.gathered.append((whole, version_of(whole)))
        return whole


class _OnUse:
    """What both classes have in common."""

    _source: _Source | None = None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run `func` on whole parameters."""
        return _compute_on_whole(func, args, kwargs or {})

    def _whole(self) -> Tensor:
        raise NotImplementedError


class WholeOnUse(_OnUse, PartialParameter):
    """A parameter of a 3-D layer while the block's code runs."""

    def _whole(self) -> Tensor:
        assert self._source is not None
        return self._source.gather(self)


class WholeValuesOnUse(_OnUse, PartialValues):
    """What `.data` of such a parameter returns; and `layer.weight`, where a backward runs the block's code again."""

    _parameter: nn.Parameter | None = None
    """what gets the gradient; None: nothing does"""

    def _whole(self) -> Tensor:
        assert self._source is not None
        return self._source.gather(self if self._parameter is None else self._parameter)


def give_whole_parameters(block: nn.Module, context: StageContext) -> None:
    """Wrap the forward of this instance, whose linear layers are converted. Its class, names and repr stay."""
    object.__setattr__(block, "_stage_context", context)
    object.__setattr__(block, "_num_layers_so_far", context.call_order.num_layers)
    object.__setattr__(block, _ORIGINAL, vars(block).get("forward"))
    object.__setattr__(block, "forward", MethodType(forward, block))


def forward(block: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the block's forward. A function of this module, so that pickle finds it by name."""
    original = vars(block)[_ORIGINAL] or MethodType(type(block).forward, block)
    if torch.compiler.is_dynamo_compiling():
        return original(*args, **kwargs)
    with _whole_on_use(block):
        output = original(*args, **kwargs)
    order = block._stage_context.call_order
    if order.num_layers == block._num_layers_so_far:  # the stage's last block: behind others there is a next call
        order.check(END)
    return output


@contextmanager
def _whole_on_use(block: nn.Module) -> Iterator[None]:
    """Give the parameters of which this rank holds a part the class that gathers them.

    Raises:
        UnsupportedError: one was changed in place by way of a view of it.
    """
    changed = [(parameter, type(parameter), source) for parameter, source in _parts_of(block)]
    for parameter, _, source in changed:
        parameter.__class__ = WholeOnUse
        vars(parameter)["_source"] = source
    try:
        with _whole_arguments():
            yield
    finally:
        for parameter, own_class, _ in changed:
            parameter.__class__ = own_class
            del vars(parameter)["_source"]
    for parameter, _, source in changed:
        if any(version_of(whole) != version for whole, version in source.gathered):
            part = vars(parameter).get("_part")
            raise UnsupportedError(
                f"{'a weight' if part is None else part.name} is changed in place by its block, by way of a view, but "
                f"each rank of a cube holds a part of it. Change it in a hook such as on_train_batch_end, or leave its "
                f"layer out of the cube with HanayoStrategy(cube_exclude=...)."
            )


@contextmanager
def _whole_arguments() -> Iterator[None]:
    """Gather what is passed to autograd.Function, scripted functions, torch.func and torch.tensor.

    They ask no `__torch_function__`.
    """
    entries: tuple[tuple[Any, str], ...] = (
        (torch.autograd.Function, "apply"),
        (torch.jit.ScriptFunction, "__call__"),
        (torch._functorch.vmap, "_process_batched_inputs"),
        *(
            (torch._functorch.eager_transforms, f)
            for f in ("grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums")
        ),
        (torch, "tensor"),
    )
    originals = [vars(owner)[name] for owner, name in entries]
    for (owner, name), function in zip(entries, originals, strict=True):
        setattr(owner, name, _gathering(function))
    try:
        yield
    finally:
        for (owner, name), function in zip(entries, originals, strict=True):
            setattr(owner, name, function)


def _gathering(function: Any) -> Any:
    call = function.__func__ if isinstance(function, classmethod) else function

    def gather(first: Any, *args: Any, **kwargs: Any) -> Any:
        is_own = isinstance(first, type) and first.__module__.startswith("lightning_hanayo.")
        if not is_own:  # ours compute on parts
            first, args, kwargs = _whole_leaves((first, args, kwargs))
        return call(first, *args, **kwargs)

    return classmethod(gather) if isinstance(function, classmethod) else gather


def _whole_leaves(tree: Any) -> Any:
    def whole(leaf: Any) -> Any:
        return leaf._whole() if isinstance(leaf, _OnUse) and leaf._source is not None else leaf

    with torch._C.DisableTorchFunctionSubclass():
        return tree_map(whole, tree)


def whole_on_use(module: ShardedLinear, name: str) -> Tensor | None:
    """The getter of a layer's weight or bias, of which this rank may hold a part."""
    parameter, shard = module._parameters[name], module.shards.get(name)
    if parameter is None or shard is None or isinstance(parameter, PartialParameter) or not _is_part(module, shard):
        return parameter
    return _alias(parameter, parameter, _Source(module.sharding.context, module.sharding.number, shard))


def _is_part(module: ShardedLinear, shard: Shard) -> bool:
    return module.sharding.context.mesh.size(shard.axes) > 1


def _parts_of(block: nn.Module) -> Iterator[tuple[nn.Parameter, _Source]]:
    for module in block.modules():
        if isinstance(module, ShardedLinear):
            for name, shard in module.shards.items():
                parameter = module._parameters[name]
                if parameter is not None and _is_part(module, shard):
                    yield parameter, _Source(module.sharding.context, module.sharding.number, shard)


def _compute_on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on whole parameters, which the ranks gather; changes in place on parts, if they are exact.

    Raises:
        UnsupportedError: a change in place isn't exact on parts, or `func` needs memory of the whole.
    """
    name = name_of(func, args, kwargs)
    parts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PartialParameter | PartialValues)]
    changes_part = any(in_place_target(name, args, kwargs) is part for part in parts)
    is_of_part = name in METADATA or name in _OF_THE_PART or name.startswith("set ") or changes_part
    if is_of_part or not all(isinstance(part, _OnUse) and part._source is not None for part in parts):
        return compute_on_parts(func, args, kwargs)
    if name in _ALIASES:
        return _alias(args[0], None, args[0]._source)
    args, kwargs = _whole_leaves((args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _alias(part: Any, parameter: nn.Parameter | None, source: "_Source | None") -> WholeValuesOnUse:
    with torch._C.DisableTorchFunctionSubclass():
        alias: WholeValuesOnUse = plain_alias(part).as_subclass(WholeValuesOnUse)
        alias._part, alias._source, alias._parameter = vars(part).get("_part"), source, parameter
        alias.requires_grad_(parameter is not None and parameter.requires_grad)
        return alias


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: Shard, mesh: Mesh) -> Tensor:
        ctx.shard, ctx.mesh, ctx.dtype = shard, mesh, gradient_dtype(part)
        return all_gather_whole(part, shard, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_whole(gradient.to(ctx.dtype), ctx.shard, ctx.mesh), None, None

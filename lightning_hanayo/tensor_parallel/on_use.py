"""Parameters of which this rank holds a part, while code runs that may compute with them: they are gathered when used.

W [8, 4] on two ranks, [4, 4] each     x @ layer.weight            the ranks gather W for this one use; the
                                                                   backward sums its gradient over them
                                       layer.weight.shape          (8, 4), without communication
                                       layer.weight.clamp_(0)      on each rank's part, as on the whole
                                       layer.weight[0].zero_()     refused: other changes in place
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._functorch.vmap
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hanayo import partial_values
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.sharding import Shard, all_gather_whole, reduce_scatter_whole
from lightning_hanayo.versions import version_of
from lightning_hanayo.weight_gradients import gradient_dtype

_ALIASES = ("data", "detach")
_OF_THE_PART = (
    "grad", "autograd.grad", "data_ptr", "const_data_ptr", "untyped_storage", "__dlpack__", "__reduce_ex__",
)  # fmt: skip


@dataclass(eq=False)
class Source:
    """Where the whole of a parameter comes from: how the ranks of a mesh hold it.

    `agree` is called first, where ranks might gather other parameters than each other.
    """

    mesh: Mesh
    shard: Shard
    agree: Callable[[], object] = bool
    gathered: list[tuple[Tensor, int]] = field(default_factory=list)
    """by this run of the code, each with its version"""

    def gather(self, part: Tensor) -> Tensor:
        """Called by all ranks of the mesh."""
        self.agree()
        whole: Tensor = _GatherWhole.apply(part, self.shard, self.mesh)
        self.gathered.append((whole, version_of(whole)))
        return whole

    def check(self, parameter: Tensor, way_out: str) -> None:
        """When the code has run.

        Raises:
            UnsupportedError: it has changed the parameter in place by way of a view of the whole.
        """
        gathered, self.gathered = self.gathered, []
        if any(version_of(whole) != version for whole, version in gathered):
            part = vars(parameter).get("_part")
            raise UnsupportedError(
                f"{'a weight' if part is None else part.name} is changed in place by way of a view, but each rank of a "
                f"cube holds a part of it. Change it in a hook such as on_train_batch_end{way_out}."
            )


class OnUse(partial_values.Guarded):
    """A tensor that is gathered when it is used."""

    _source: Source | None = None
    _parameter: nn.Parameter | None = None
    """gets the gradient; None: the tensor itself"""

    @staticmethod
    def compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `func` on whole parameters."""
        return compute_on_whole(func, args, kwargs)

    def whole(self) -> Tensor:
        """The whole, gathered now. Called by all ranks."""
        assert self._source is not None
        return self._source.gather(self if self._parameter is None else self._parameter)


class WholeOnUse(OnUse, partial_values.PartialParameter):
    """A parameter of a 3-D layer while the block's code runs."""


class WholeValuesOnUse(OnUse, partial_values.PartialValues):
    """The `.data` of such a parameter; and `layer.weight`, where a backward runs the block's code again."""


@contextmanager
def whole_arguments() -> Iterator[None]:
    """Gather arguments of autograd.Function, scripted functions, torch.func and torch.tensor.

    They ask no `__torch_function__`.
    """
    entries: tuple[tuple[Any, str], ...] = (
        (torch.autograd.Function, "apply"),
        (torch.jit.ScriptFunction, "__call__"),
        (torch._functorch.vmap, "_process_batched_inputs"),
        (torch._functorch.eager_transforms, "grad_and_value_impl"),
        (torch._functorch.eager_transforms, "_vjp_with_argnums"),
        (torch._functorch.eager_transforms, "_jvp_with_argnums"),
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
        return leaf.whole() if isinstance(leaf, OnUse) and leaf._source is not None else leaf

    with torch._C.DisableTorchFunctionSubclass():
        return tree_map(whole, tree)


def compute_on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` on whole parameters, which the ranks gather; changes in place on parts, if they are exact.

    Raises:
        UnsupportedError: a change in place isn't exact on parts, or `func` needs memory of the whole.
    """
    name = partial_values.name_of(func, args, kwargs)
    parts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, partial_values.OfPart)]
    changes_part = any(partial_values.in_place_target(name, args, kwargs) is part for part in parts)
    is_of_part = name in partial_values.METADATA or name in _OF_THE_PART or name.startswith("set ") or changes_part
    if is_of_part or not all(isinstance(part, OnUse) and part._source is not None for part in parts):
        return partial_values.compute_on_parts(func, args, kwargs)
    if name in _ALIASES:
        return alias(args[0], None, args[0]._source, counts=name != "data")
    args, kwargs = _whole_leaves((args, kwargs))
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def alias(
    part: Any,
    parameter: nn.Parameter | None,
    source: Source | None,
    kind: type[OnUse] = WholeValuesOnUse,
    *,
    counts: bool = True,
) -> OnUse:
    """The memory of a part, gathered from `source` when it is used; the `parameter` gets the gradient, if any.

    `counts`: whether changes in place count as changes of the part, too.
    """
    with torch._C.DisableTorchFunctionSubclass():
        plain = partial_values.plain_alias(part)
        made: Any = (plain if counts else plain.data).as_subclass(kind)
        made._part, made._source, made._parameter = vars(part).get("_part"), source, parameter
        made.requires_grad_(parameter is not None and parameter.requires_grad)
        return made  # type: ignore[no-any-return]


class _GatherWhole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, shard: Shard, mesh: Mesh) -> Tensor:
        ctx.shard, ctx.mesh, ctx.dtype = shard, mesh, gradient_dtype(part)
        return all_gather_whole(part, shard, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter_whole(gradient.to(ctx.dtype), ctx.shard, ctx.mesh), None, None

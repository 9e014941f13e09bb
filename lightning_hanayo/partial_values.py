"""Tensors of which this rank holds a part, as user code sees them: they refuse operations that are wrong on a part.

    W [8, 4] on two ranks, [4, 4] each        W.shape, W.requires_grad          allowed: (8, 4), as of the whole
                                              W.data.mul_(0.5), W.zero_()       allowed: the same on each element
                                              W.grad.add_(W, alpha=0.1)         allowed: both are parts of W
                                              W.norm(), W ** 2, W[0], W.T       refused: the whole's result is another

A sum or a product over a part looks like one over the whole, and would be wrong without an error.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hanayo.errors import UnsupportedError

FULL_PARAMETER = "self.trainer.strategy.full_parameter(parameter)"

_SIZES = frozenset(
    ("shape", "size", "numel", "nelement", "nbytes", "__len__", "stride", "storage_offset", "is_contiguous",
     "is_same_size")
)  # fmt: skip
OF_DEVICE = frozenset(("device", "type", "get_device", "is_cpu", "is_cuda", "is_meta", "is_shared", "is_pinned"))
OF_OBJECT = frozenset(
    ("requires_grad", "requires_grad_", "is_leaf", "retains_grad", "output_nr", "_version", "__hash__", "grad_fn",
     "is_inference", "grad_dtype", "register_hook", "register_post_accumulate_grad_hook")
)  # fmt: skip
METADATA = _SIZES | OF_DEVICE | OF_OBJECT | frozenset(
    ("ndim", "itemsize", "dim", "ndimension", "element_size", "dtype", "layout", "is_floating_point", "is_complex",
     "is_signed", "names", "is_sparse", "is_quantized", "is_nested")
)  # fmt: skip
"""attributes and methods that read no values: of the shape, of where values are, of the tensor object, of the dtype"""

_IN_PLACE = frozenset(
    ("add_", "sub_", "mul_", "div_", "clamp_", "zero_", "fill_", "copy_", "lerp_", "constant_",
     "__iadd__", "__isub__", "__imul__", "__itruediv__")
)  # fmt: skip
"""computations of each element alone, from numbers and from the same element of other tensors"""
_COPIES = frozenset(("data", "grad", "detach", "clone", "cpu", "contiguous", "zeros_like", "ones_like", "full_like"))
"""functions that give each element the same value, or its own"""


_INSTEAD = (
    f"Use {FULL_PARAMETER}, which returns the whole on all ranks; in training_step its gradient reaches the parameter. "
    f"For norms over all gradients use torch.nn.utils.clip_grad_norm_, get_total_norm, or Lightning's grad_norm"
)


@dataclass(frozen=True)
class Part:
    """Which parameter something is a part of: its qualified `name`, and the whole's `shape`."""

    name: str
    shape: tuple[int, ...]
    is_of_data_rank: bool = False
    """whether it is the data rank's part of an optimizer's shards, and otherwise a cube rank's part"""
    of: str = field(default="", compare=False)
    """text before the name if it isn't the parameter itself, such as "the optimizer's exp_avg of " """
    way_out: str = field(default=_INSTEAD, compare=False)


def partial_alias(tensor: Tensor, part: Part | None) -> "PartialValues":
    """The tensor's memory, as a part of `part`; of an unnamed parameter if None."""
    with torch._C.DisableTorchFunctionSubclass():
        alias: PartialValues = tensor.detach().as_subclass(PartialValues)
    alias._part = part
    return alias


def name_of(func: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> str:
    """The function's name; for an attribute that is read the attribute's, and `set shape` for one that is set.

    Names with two meanings become two: `type()` reads, `type(dtype)` converts; `grad` is the attribute.
    """
    name: str = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        attribute = getattr(getattr(func, "__self__", None), "__name__", "an attribute")
        return attribute if name == "__get__" else f"set {attribute}"
    if name == "type" and any(argument is not None for argument in (*args[1:], *(kwargs or {}).values())):
        return "type(dtype)"
    return "autograd.grad" if name == "grad" else name


def of_device(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], device: torch.device) -> Any:
    """The result of a function of `OF_DEVICE` for a tensor whose values are, or would be, on this device."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(torch.empty(0, dtype=args[0].dtype, device=device), *args[1:], **kwargs)


def in_place_target(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor that an operation in place writes into; None if it is none."""
    if kwargs.get("out") is not None:
        return kwargs["out"]
    is_operator = name.startswith("__i") and name.endswith("__") and name not in ("__int__", "__index__", "__invert__")
    if name == "__setitem__" or is_operator or (name.endswith("_") and not name.endswith("__")):
        return args[0] if args else next(iter(kwargs.values()))
    return None


def compute_on_parts(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func`, if it is exact on parts; its result is a part as well.

    Raises:
        UnsupportedError: it isn't exact.
    """
    name = name_of(func, args, kwargs)
    parts = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OfPart)]
    if name not in METADATA and not _is_exact(name, args, kwargs):
        raise UnsupportedError(_message(name, parts[0]))
    if name == "detach_" and isinstance(args[0], PartialValues):
        return args[0]  # it has no graph
    with torch._C.DisableTorchFunctionSubclass():
        if name in _SIZES:
            args, kwargs = tree_map(_shaped_as_whole, (args, kwargs))
        elif name.startswith("set "):
            args = (args[0], *(plain_alias(one) if isinstance(one, PartialValues) else one for one in args[1:]))
        result = func(*args, **kwargs)
    return partial_alias(result, parts[0]._part) if name in _COPIES and result is not None else result


def _is_exact(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name in _COPIES or name in ("set requires_grad", "_foreach_zero_", "detach_"):
        return True
    if name in ("set data", "set grad"):  # to nothing, when it is deleted
        return all(value is None or _is_same_part(value, args[0]) for value in args[1:])
    if name not in _IN_PLACE:
        return False
    target, *operands = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    # numbers are tensors without dimensions, such as a norm over all gradients, and of no parameter
    others = [one for one in operands if type(one) is not Tensor or one.dim() > 0]
    return all(_is_same_part(one, target) for one in (target, *others))


def _shaped_as_whole(leaf: Any) -> Any:
    """A part as a tensor with the whole's shape; anything else as it is. Called where torch functions are plain."""
    if not isinstance(leaf, OfPart) or leaf._part is None:
        return leaf
    return torch.empty(leaf._part.shape, dtype=leaf.dtype, device="meta")


def _is_same_part(operand: Any, target: Any) -> bool:
    """Whether both are parts of one parameter, so that their elements belong together."""
    if not isinstance(operand, OfPart):
        return False
    return operand._part is not None and operand._part == target._part and own_shape(operand) == own_shape(target)


def plain_alias(part: Tensor) -> Tensor:
    """The tensor's memory as a plain tensor, for code that knows of parts."""
    with torch._C.DisableTorchFunctionSubclass():
        return part.detach().as_subclass(Tensor)


def is_saving() -> bool:
    """Whether `torch.save` has called this: its files are read elsewhere, unlike copies of a Trainer or a module."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename == torch.serialization.__file__:
            return True
    return False


def own_shape(part: Any) -> tuple[int, ...]:
    """The shape of this rank's part."""
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(part.shape)


def _message(name: str, part: Any) -> str:
    if part._part is None:
        return (
            f"{name} was called with the weight of a 3-D layer, of which this rank holds a part: the result would be "
            f"wrong. Call the layer itself, or leave it out of the cube."
        )
    return (
        f"{name} was called with {part._part.of}{part._part.name}, of which this rank holds a part of shape "
        f"{own_shape(part)} of the whole {part._part.shape}: the result would be wrong. {part._part.way_out}."
    )


class Guarded(Tensor):
    """A tensor that checks each use in user code."""

    compute: ClassVar[Callable[..., Any]]
    """the result of a function, its arguments and its keyword arguments, one of which is of this class"""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute as the subclass does.

        Raises:
            UnsupportedError: `func` isn't exact here.
        """
        return cls.compute(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy checks each use, too."""
        memo[id(self)] = copied = plain_alias(self).clone().as_subclass(type(self))
        vars(copied).update(_attributes(self))
        return copied


class GuardedParameter(Guarded, nn.Parameter):
    """A parameter that checks each use. It has this class only while user code runs, or between runs."""

    pickled_class: ClassVar[type[nn.Parameter] | None] = nn.Parameter
    """of a pickled copy: the class between hooks; None: this one"""

    def refusal(self, name: str) -> str:
        """The message of the error where `name` is called with it."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy keeps this class."""
        plain = plain_alias(self).clone()
        memo[id(self)] = copied = restore(type(self), plain, self.requires_grad, _attributes(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it. A Trainer may be copied with its module, but a file would hold parts.

        Raises:
            UnsupportedError: `torch.save` is writing a file.
        """
        if is_saving():
            raise UnsupportedError(self.refusal("torch.save"))
        kind = self.pickled_class or type(self)
        return restore, (kind, plain_alias(self), self.requires_grad, _attributes(self))


def _attributes(tensor: Tensor) -> dict[str, Any]:
    """All but the source of whole values that a generic block's parameters have while the block runs."""
    return {name: value for name, value in vars(tensor).items() if name != "_source"}


AnyParameter = TypeVar("AnyParameter", bound=nn.Parameter)


def restore(kind: type[AnyParameter], data: Tensor, requires_grad: bool, attributes: dict[str, Any]) -> AnyParameter:
    """A parameter of this class, with these attributes. Pickle finds it by name."""
    with torch._C.DisableTorchFunctionSubclass():
        parameter = kind(data, requires_grad)
    vars(parameter).update(attributes)
    return parameter


class OfPart(Guarded):
    """A tensor of which this rank holds a part: it refuses every computation but those that are the same on parts."""

    compute = staticmethod(compute_on_parts)
    _part: Part | None = None

    def __copy__(self) -> "PartialValues":
        """A copy is a part, too."""
        return partial_alias(self, self._part)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        """Describe it; the values of a part would look like the whole's."""
        if self._part is None:
            return f"a part {own_shape(self)} of a 3-D layer's weight"
        return f"a part {own_shape(self)} of {self._part.of}{self._part.name} {self._part.shape}"


class PartialValues(OfPart):
    """An alias of a part of `_part`."""


class PartialParameter(OfPart, GuardedParameter):
    """A parameter of which this rank holds a part, while user code runs: it has this class only then."""

    def refusal(self, name: str) -> str:
        """Says that the result would be wrong."""
        return _message(name, self)

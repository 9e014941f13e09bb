"""Code between two blocks: functions of torch, called with outputs of blocks that run on other ranks.

    step         x = block 1(x)     x = x + table          x = block 2(x)      block 2 is on another rank
    recorded     block 1            torch.Tensor.__add__   block 2             one list of calls, in order
    stage                           runs the function, then block 2

In the step these outputs have no values. Their shapes, dtypes and devices are found by running the functions, and where
that is asked for the blocks, on fake tensors: once for each kind of arguments.

The proxy: stands for a block's output in the user's step while the block runs on another rank.

The user's code may pass a proxy to the next block, take it out of a tuple, or call functions of torch with it, which
the tracer records. What needs its value raises an error that names the user's line.
"""

import copy
import linecache
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel import pytree, split_backward
from lightning_hanayo.pipeline_parallel.capture.forward_patch import unpatch_blocks
from lightning_hanayo.pipeline_parallel.capture.threads import Autocast, autocast_as, autocast_state, current_tracer
from lightning_hanayo.pipeline_parallel.graph_boundary import alias, stop_recomputing
from lightning_hanayo.pipeline_parallel.pytree import OutputReference, map_tree

_NOT_USER_CODE = (str(Path(__file__).parents[2]), str(Path(torch.__file__).parent), threading.__file__)
"""file names that begin so are not the user's code"""
SKIPPED_BLOCKS = (
    "Blocks that are left out (layerdrop above 0, self.blocks[:n]) must be called as well, and return their input; or "
    "delete them before the run."
)
"""how errors about missing calls of blocks end"""
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "matmul", "pow", "and", "or", "xor")
_OPERATORS = (
    *(f"{prefix}{name}" for name in _ARITHMETIC for prefix in ("", "r", "i")),
    *("neg", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge", "divmod", "round"),
    *("getitem", "setitem", "delitem", "contains", "iter", "next", "reversed", "len"),
    *("bool", "int", "index", "float", "complex", "call"),
)


class Valueless:
    """Stands for a value that isn't on this rank: every use of it raises an error."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # copy, pickle and inspect look these up on every object
        self.refuse(f".{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name):
            self.refuse(f".{name} = ...")
        super().__setattr__(name, value)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _first_in((*args, *(kwargs or {}).values())).refuse(getattr(function, "__name__", str(function)))

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for a use of the value."""
        raise NotImplementedError


def _operator(name: str) -> Any:
    def operator(self: Valueless, *_: object) -> NoReturn:
        self.refuse(f"__{name}__")

    return operator


for _name in _OPERATORS:
    setattr(Valueless, f"__{_name}__", _operator(_name))


class Proxy(Valueless, OutputReference):
    """The part at `path` of output number `block`, of which this rank has no value.

    It is used like a tensor: the step's tracer records functions of torch that are called with it. It doesn't claim to
    be one: torch's C++ code would take any object whose `__class__` is Tensor for a tensor's memory.
    """

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Proxy{list(self.path) or ''}"

    def __reduce__(self) -> Any:
        return Proxy, (self.path, self.block)

    def __getattr__(self, name: str) -> Any:
        found = None if name in ("__array__", "__deepcopy__") else getattr(torch.Tensor, name, None)
        if found is None or type(found).__name__ == "_DisabledTorchFunctionImpl":
            return super().__getattr__(name)
        if not callable(found):
            return _recorded(self, found.__get__, (self,))
        return lambda *args, **kwargs: _recorded(self, found, (self, *args), kwargs)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _recorded(_first_in((*args, *(kwargs or {}).values())), function, args, kwargs)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0))

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for code that needs a value. It names the user's line."""
        tracer = current_tracer()
        if tracer is None or tracer.is_between_passes:
            why = (
                ", but it is on another pipeline stage: only the last block's output comes back to the step. Let the "
                "block store it as an attribute (self.value = x), which the step may read after the stack."
            )
        else:
            why = (
                f" before {tracer.next_block} is called, where only functions of torch that need no values may stand. "
                f"Move the code into the block, or name another stack: HanayoStrategy(blocks=...). {SKIPPED_BLOCKS}"
            )
        raise UnsupportedError(f"{user_line()} uses the output of a block ({operation}){why}")


def _recorded(proxy: Proxy, function: Any, args: Any, kwargs: Any = None) -> Any:
    """Record a function that is called with a proxy, and return proxies for its result; or its answer."""
    tracer = current_tracer()
    if tracer is None:
        proxy.refuse(getattr(function, "__name__", str(function)))
    return tracer.on_function(proxy, function, args, kwargs or {})


def functions_on_proxies(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function that doesn't know `__torch_function__`; with a proxy only where its value is here."""
    proxy = next((one for one in (*args, *kwargs.values()) if type(one) is Proxy), None)
    return function(*args, **kwargs) if proxy is None else _recorded(proxy, function, args, kwargs)


def _first_in(values: Sequence[Any]) -> Any:
    found = (x for value in values for x in (value if isinstance(value, (list, tuple)) else [value]))
    return next(x for x in found if isinstance(x, Valueless) or type(x) is Proxy)


def _recorded_operator(name: str) -> Any:
    function = getattr(torch.Tensor, name)

    def operator(self: Proxy, *args: Any) -> Any:
        return _recorded(self, function, (self, *args))

    return operator


for _name in _OPERATORS:
    if hasattr(torch.Tensor, f"__{_name}__") and _name not in ("iter", "contains"):
        setattr(Proxy, f"__{_name}__", _recorded_operator(f"__{_name}__"))


class Unavailable(Valueless):
    """A value that a block on another rank has stored. `why` begins with its name, and ends with the way out."""

    __slots__ = ("why",)
    __hash__ = object.__hash__
    why: str

    def __init__(self, why: str) -> None:
        self.why = why

    def refuse(self, operation: str) -> NoReturn:
        """Raise the error for code that reads the value."""
        raise UnsupportedError(f"{user_line()} uses a value that isn't here ({operation}): {self.why}")


def user_line() -> str:
    """The user's line that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_USER_CODE):
        frame = frame.f_back
    if frame is None:
        return "your module"
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}:{number} ({linecache.getline(file, number).strip()})"


def proxies_like(tree: Any, block: int) -> Any:
    """Return proxies for output number `block` in the containers of `tree`, so that tuples can be unpacked."""
    return map_tree(tree, lambda leaf, path: leaf if leaf is None else Proxy(path, block))


def subtree(tree: Any, path: tuple[Any, ...]) -> Any:
    """The part of `tree` at `path`."""
    for key in path:
        tree = tree[key]
    return tree


NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
"""raised for functions whose result, or its shape, depends on values"""
_REFUSED = frozenset(
    ("item", "tolist", "numpy", "data_ptr", "backward", "register_hook", "register_post_accumulate_grad_hook",
     "retain_grad", "grad", "requires_grad_", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__", "set_")
)  # fmt: skip
"""functions that need values, or would act on one rank alone"""
_MOST_KNOWN = 4096
Shapes = Mapping[Tensor, tuple[int, ...]]
KEPT = ""
"""in place of the name of a function: returns the output of the stack, and those before it that the step still has"""


@lru_cache(maxsize=1024)
def name_of(function: Callable[..., Any]) -> str | None:
    """The name by which all ranks find a function of torch; None if it can't be recorded."""
    name = resolve_name(function)
    own = "" if name is None else name.removesuffix(".__get__").rpartition(".")[2]
    return None if own in _REFUSED else name


@lru_cache(maxsize=1024)
def function_of(name: str) -> Callable[..., Any]:
    """The function with that name."""
    found: Any = torch
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def run(args: Sequence[Any], kwargs: dict[str, Any], name: str, changed_modes: tuple[bool, Autocast] | None) -> Any:
    """Run a recorded function, in the modes in which the step calls it. A pass without gradients has none."""
    if name == KEPT:
        return args
    if changed_modes is None:
        return function_of(name)(*args, **kwargs)
    grad, autocast = changed_modes
    grad_mode = torch.set_grad_enabled(grad and torch.is_grad_enabled())
    with grad_mode, autocast_as(autocast, torch.is_autocast_cache_enabled()):
        return function_of(name)(*args, **kwargs)


class Spec(NamedTuple):
    """All that is known of a tensor without values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> "Spec":
        """The spec of a tensor."""
        return Spec(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)

    def fake(self) -> Tensor:
        """A tensor like this, in a `FakeTensorMode`. It may be changed in place."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        if not self.requires_grad:
            return made
        with torch.enable_grad():
            return alias(made.requires_grad_())


OF_STEP = object()
"""the storage of all tensors that the step itself has"""


@dataclass(eq=False)
class Value:
    """What the step knows of a tensor on another rank: that is changed in place; a view has the same `storage`."""

    spec: Spec
    storage: Any
    position: int = -1
    """of the call that has made it"""


@dataclass(frozen=True)
class Made:
    """What a function or a block makes of arguments of one kind."""

    tree: Any
    """with a `Value` for each tensor, whose storage is the number of the argument that it is a view of, or None"""
    has_tensors: bool
    changed: tuple[tuple[int, Spec], ...]
    """the arguments that are changed in place, and how they are then"""

    def values(self, arguments: Sequence[Value], position: int) -> Any:
        """The tree with a new value for each tensor."""

        def value(leaf: Any, _: Any) -> Any:
            if not isinstance(leaf, Value):
                return leaf
            storage = object() if leaf.storage is None else arguments[leaf.storage].storage
            return Value(leaf.spec, storage, position)

        return pytree.map_tree(self.tree, value)


@dataclass(eq=False, repr=False)
class StandIns:
    """Runs functions and blocks without values, once for each kind of arguments. One for all steps of a rank."""

    copy_of: Callable[[nn.Module], tuple[nn.Module, Shapes]] = lambda block: (copy.deepcopy(block), {})
    """copies a block, in a cube with the layers that it had; also returns whole shapes of parameters"""
    _known: dict[Any, Made] = field(default_factory=dict, init=False)
    _mode: FakeTensorMode | None = field(default=None, init=False)

    def run(
        self, block: nn.Module | None, call: pytree.Skeleton, tensors: Sequence[Tensor], value_of: Callable[..., Value]
    ) -> tuple[Made, list[Value]]:
        """Run the block, or the function that the call names; also return the values that it gets.

        `value_of` is called with the path and the distance of each output in the call.

        Raises:
            UnsupportedError: the block doesn't run without values.
        """
        own, indices, proxies = _canonical(call)
        with torch._C.DisableTorchFunctionSubclass():
            given = [Value(Spec.of(tensors[i]), OF_STEP) for i in indices]
        given += [value_of(path, distance) for _, distance, path in proxies]
        specs = tuple([one.spec for one in given])
        current = torch.is_grad_enabled(), autocast_state()
        key = block, own, specs, current, block is not None and block.training
        if key not in self._known:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            try:
                self._known[key] = self._run(block, own, specs, len(indices))
            except Exception as error:  # of the user's code
                if block is None:
                    raise
                raise UnsupportedError(
                    f"code between two blocks computes with the output of a {type(block).__name__}, which doesn't run "
                    f"without values ({type(error).__name__}: {error}). Move that code into the block."
                ) from error
        return self._known[key], given

    def _run(self, block: nn.Module | None, call: pytree.Skeleton, specs: Sequence[Spec], num_tensors: int) -> Made:
        self._mode = self._mode or FakeTensorMode(allow_non_fake_inputs=True)
        copied = None if block is None else self._copy(block)  # torch 2.10 to 2.12 copy no placeholder in the mode
        # hooks of a checkpoint around the call must not see tensors of this run
        with self._mode, torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            given = [spec.fake() for spec in specs]
            outputs = iter(given[num_tensors:])
            args, kwargs, *named = pytree.unflatten(call, given, lambda *_: next(outputs))
            before = [one._version for one in given]
            run = function_of(named[0]) if copied is None else _faked(*copied, specs)
            made = run(*args, **kwargs)
        storages = [one.untyped_storage()._cdata for one in given]

        def value(leaf: Any, _: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = leaf.untyped_storage()._cdata
            return Value(Spec.of(leaf), storages.index(own) if own in storages else None)

        return Made(
            pytree.map_tree(made, value),
            any(isinstance(leaf, Tensor) for leaf in tree_leaves(made)),
            tuple((i, Spec.of(one)) for i, one in enumerate(given) if one._version != before[i]),
        )

    def _copy(self, block: nn.Module) -> tuple[nn.Module, nn.Module, Shapes]:
        """The block, an unpatched copy, and the whole shapes of parameters of which ranks have parts."""
        with torch._C.DisableTorchFunctionSubclass():
            copied, shapes = self.copy_of(block)
        unpatch_blocks([copied])
        stop_recomputing([copied])
        split_backward.unpatch_linear_layers([copied])
        return block, copied, shapes


def _faked(block: nn.Module, copied: nn.Module, shapes: Shapes, specs: Sequence[Spec]) -> nn.Module:
    """The copy of the block, with fake tensors on the device of these arguments."""
    device = next((spec.device for spec in specs), torch.device("cpu"))
    for own, part in zip(block.modules(), copied.modules(), strict=True):
        for name, one in part._parameters.items():
            if one is not None:
                shape = shapes.get(own.get_parameter(name), tuple(one.shape))
                made = torch.empty(shape, dtype=one.dtype, device=device)
                part._parameters[name] = nn.Parameter(made, one.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
        vars(part).update({name: kept.copy() for name, kept in vars(part).items() if type(kept) in (list, set)})
    return copied


@lru_cache(maxsize=1024)
def _canonical(call: pytree.Skeleton) -> tuple[pytree.Skeleton, list[int], list[pytree.Skeleton]]:
    """The call with its tensors numbered from 0 and its outputs without numbers; indices of both, in their order."""
    indices = pytree.tensor_indices(call)
    new = {index: i for i, index in enumerate(indices)}
    proxies: list[pytree.Skeleton] = []

    def change(leaf: pytree.Skeleton) -> pytree.Skeleton:
        if leaf[0] == "tensor":
            return ("tensor", new[leaf[1]])
        proxies.append(leaf)
        return ("proxy", 0, ())

    return pytree.map_leaves(call, change), indices, proxies


def with_indices(args: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of an indexing with masks of the step as indices: how many values they select is known here."""
    _, index, *_ = args
    parts = index if isinstance(index, tuple) else (index,)
    found: list[Any] = []
    for part in parts:
        is_mask = isinstance(part, Tensor) and not isinstance(part, pytree.OutputReference) and part.dtype is torch.bool
        found += part.nonzero(as_tuple=True) if is_mask else [part]
    return args[0], tuple(found), *args[2:]

"""Guards parameters of which this rank holds a part or nothing, while user code runs.

    scope        runs on                     guarded
    "off"        -                           none: Lightning, optimizers, our layers
    "step"       the ranks of pipeline       placeholders, and parts of the blocks; parameters outside the stack
                 rank 0                      are whole while a batch runs
    "hook"       all ranks                   placeholders, and all parts
    "alone"      as the step                 as in a hook, but changes of a placeholder happen nowhere

Guarded parameters take a class that checks every use, and get their own class back afterwards: optimizers and 3-D
layers find plain parameters, and nothing costs time but entering and leaving. Between runs `guard` guards the same
parameters as in hooks: sizes can be read, any other use is an error, until `release` gives the next run plain ones.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from math import nan
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hanayo import partial_values
from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.ownership import Placeholder
from lightning_hanayo.seeds import default_generator

Scope = Literal["off", "step", "hook", "alone"]


class _Guarded(NamedTuple):
    parameter: nn.Parameter
    own_class: type[nn.Parameter]
    class_in_user_code: type[nn.Parameter]


class ParameterGuard:
    """The guarded parameters of one run.

    Args:
        device: where this rank's parameters are.
    """

    def __init__(self, device: torch.device) -> None:
        self.scope: Scope = "off"
        self.hook_name = ""
        """the hook that runs; empty in a step"""
        self.device = device
        self.after_step: Callable[[], object] = bool
        """called each time when code of a step has run"""
        self.before_user_code: Callable[[], object] = bool
        """called each time before user code begins"""
        self.after_user_code: Callable[[], object] = bool
        """called each time when user code has ended"""
        self.after_registering: Callable[[], object] = bool
        """called at the end of a hook that runs on all ranks, if it has registered parameters or modules"""
        self.num_registered = 0
        """how often any module was given a parameter or a child"""
        self.num_entered = 0
        """how often user code began or ended: others see that this rank moves"""
        self._drawn = Drawn()
        self._own: list[nn.Parameter] = []
        self._guarded: dict[Scope, list[_Guarded]] = {}
        self._placeholder_class = type("GuardedPlaceholder", (GuardedPlaceholder,), {"user_code": self})

    def watch(
        self,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, int],
        shapes: Mapping[Tensor, tuple[int, ...]],
        guarded_in_steps: Mapping[Tensor, type[nn.Parameter]],
    ) -> None:
        """Say which parameters to guard.

        Args:
            parameters: all of the model, by qualified name.
            owners: the pipeline rank of each.
            shapes: the whole shapes of those of which this rank holds a part.
            guarded_in_steps: those of the latter that are parts in a step, too, and the class of each there.
        """
        missing, in_hooks, in_steps = [], [], []
        for name, parameter in parameters.items():
            if isinstance(parameter, Placeholder):
                vars(parameter)["_owner"] = Owner(name, owners[name], self.device, drawn=self._drawn)
                missing.append(_Guarded(parameter, Placeholder, self._placeholder_class))
            elif parameter in shapes or parameter in guarded_in_steps:
                shape = shapes.get(parameter, tuple(parameter.shape))
                vars(parameter)["_part"] = partial_values.Part(name, shape)
                if parameter in shapes:
                    in_hooks.append(_Guarded(parameter, type(parameter), partial_values.PartialParameter))
                if parameter in guarded_in_steps:
                    in_steps.append(_Guarded(parameter, type(parameter), guarded_in_steps[parameter]))
        self._own = [parameter for parameter in parameters.values() if not isinstance(parameter, Placeholder)]
        in_hooks += missing
        self._guarded = {"step": [*missing, *in_steps], "hook": in_hooks, "alone": in_hooks}

    def end(self) -> list[nn.Parameter]:
        """After the run: guard nothing any more; return the placeholders, and the parameters that are parts."""
        self._enter("off", "")
        partial = [one.parameter for one in self._guarded.get("hook", ())]
        for one in self._guarded.get("step", ()):
            if not any(one.parameter is other for other in partial):
                del vars(one.parameter)["_part"]  # whole here, though its gradient isn't
        self._guarded = {}
        return partial

    def during(self, scope: Scope, hook_name: str = "") -> AbstractContextManager[None]:
        """Guard the parameters of `scope`; afterwards as before."""
        return _During(self, scope, hook_name)

    @contextmanager
    def hook(self, scope: Scope, name: str) -> Iterator[None]:
        """While a hook runs."""
        num_registered = self.num_registered
        with self.during(scope, name):
            yield
        if scope == "hook" and self.num_registered != num_registered:
            self.after_registering()

    def note_registration(self, *_: Any) -> None:
        """Called by torch when a module is given a parameter or a child."""
        self.num_registered += 1

    def step(self) -> AbstractContextManager[None]:
        """While the user's step runs. Afterwards as before, as in `during`."""
        return _During(self, "step", "", self.after_step)

    def off(self) -> AbstractContextManager[None]:
        """While code runs that user code has called, and that knows of parts and placeholders.

        Example:
            >>> with guard.off():
            ...     norm = norm_over_all_ranks(parameters)  # finds plain parameters and placeholders, and their `.grad`
        """
        return self.during("off")

    def in_this_scope(self, function: Callable[[], Any]) -> Callable[[], Any]:
        """The function, which runs with the same guards as now: user code that is called back when the guard is off."""
        scope, hook_name = self.scope, self.hook_name

        def run() -> Any:
            with self.during(scope, hook_name):
                return function()

        return run

    def check_all_ranks(self, function: str) -> None:
        """Check that the user code that runs now, and calls the function, runs on all ranks.

        Raises:
            UnsupportedError: it runs on pipeline rank 0 alone.
        """
        if self.scope in ("step", "alone"):
            raise UnsupportedError(
                f"{function} was called in {self.hook_name or 'a step'}, which runs on pipeline rank 0 alone. Call it "
                f"in a hook that runs on all ranks, such as on_train_epoch_end, or after fit."
            )

    @property
    def runs_on_all_ranks(self) -> bool:
        """Whether the user code that runs now runs on all pipeline ranks."""
        return self.scope in ("hook", "off")

    def has_gradients(self) -> bool:
        """Whether parameters have gradients now: all ranks have theirs from the same moment on."""
        with torch._C.DisableTorchFunctionSubclass():
            trained = [parameter for parameter in self._own if parameter.requires_grad]
            return not trained or any(parameter.grad is not None for parameter in trained)

    def _enter(self, scope: Scope, hook_name: str) -> None:
        if scope != self.scope:
            if scope != "off":
                self.before_user_code()
            for parameter, own_class, _ in self._guarded.get(self.scope, ()):
                parameter.__class__ = own_class
            for parameter, _, guarded in self._guarded.get(scope, ()):
                parameter.__class__ = guarded
            self._drawn.forget()
            if scope == "off":
                self.after_user_code()
        self.scope, self.hook_name = scope, hook_name
        self.num_entered += 1


@dataclass(slots=True)
class _During:
    """A class, as generators take longer: each step is entered twice. `then` is called unless the code inside fails."""

    guard: ParameterGuard
    scope: Scope
    hook_name: str
    then: Callable[[], object] = bool
    before: tuple[Scope, str] = ("off", "")

    def __enter__(self) -> None:
        self.before = self.guard.scope, self.guard.hook_name
        self.guard._enter(self.scope, self.hook_name)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.guard._enter(*self.before)
        if kind is None:
            self.then()


_TO_DEVICE = frozenset(("cpu", "cuda"))
_NEEDS_VALUES = frozenset(
    ("item", "tolist", "numpy", "backward", "autograd.grad", "data_ptr", "const_data_ptr", "__format__", "__array__",
     "__reduce_ex__", "__dlpack__")
)  # fmt: skip
_NUMBERS = (0.03, 0.97)
"""in place of missing ones; they are probabilities, too, so that functions which draw by them take them"""


_NEEDED = "its values are needed here"


class Drawn:
    """The tensor without values that user code has filled with random numbers last, and these numbers."""

    def __init__(self) -> None:
        self.target: Any = None
        self.numbers: Any = None
        self.compared: set[Callable[..., Any]] = set()
        """functions that draw equally many numbers whatever the missing values are"""

    def forget(self) -> None:
        """Called when user code begins or ends."""
        self.target, self.numbers = None, None

    def __reduce__(self) -> Any:
        return Drawn, ()


@dataclass(frozen=True)
class Owner:
    """Where values are: the qualified `name` of a parameter, or another name, its pipeline rank, and its device."""

    name: str
    rank: int
    device: torch.device
    way_out: str = (
        f"A hook that runs on all ranks calls {partial_values.FULL_PARAMETER} and uses what it returns; training_step "
        f"uses what on_train_batch_start has got so. For norms over all gradients use torch.nn.utils.clip_grad_norm_, "
        f"get_total_norm, or Lightning's grad_norm; for weight decay the optimizer's weight_decay"
    )
    drawn: Drawn = field(default_factory=Drawn, compare=False)
    """the same of all owners of a run"""


def without_values(tensor: Tensor, owner: Owner) -> "MissingValues":
    """Something of this shape and dtype that `owner` has the values of."""
    with torch._C.DisableTorchFunctionSubclass():
        result: MissingValues = torch.empty_like(tensor, device="meta", requires_grad=False).as_subclass(MissingValues)
    result._owner = owner
    return result


def compute_without_values(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The owner's result of `func`, without values here; an operation in place changes nothing here.

    Raises:
        UnsupportedError: `func` needs values, or writes into a tensor that has values here.
    """
    name, owner = partial_values.name_of(func, args, kwargs), next(_owners(args, kwargs))
    # torch.nn.init leaves out meta tensors; all other code may know it by `is_meta`
    is_init = name == "is_meta" and _caller() == nn.init.__name__
    if name in partial_values.OF_DEVICE and (name != "is_meta" or is_init):
        # a tensor that is made there goes with the owner's values
        return partial_values.of_device(func, args, kwargs, owner.device)
    if name in partial_values.METADATA or name == "set requires_grad":
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    target, drawn = partial_values.in_place_target(name, args, kwargs), owner.drawn
    if name.startswith("set "):
        drawn.target = None
        return None
    if name.startswith("_foreach_") and len(args[0]) > 1:
        # each element alone, as some of them have values here
        rows = [[[arg[i]] if isinstance(arg, list | tuple) else arg for arg in args] for i in range(len(args[0]))]
        results = [func(*row, **kwargs) for row in rows]
        return None if func.__name__.endswith("_") else tuple(result for row in results for result in row)
    if drawn.target is not None and any(leaf is drawn.target for leaf in tree_leaves((args, kwargs))):
        filled, numbers = drawn.target, drawn.numbers
        args, kwargs = tree_map(lambda leaf: numbers if leaf is filled else leaf, (args, kwargs))
        result = func(*args, **kwargs)
        return filled if result is numbers else result
    if name == "new_tensor":  # of values that are here
        return func(torch.empty(0, dtype=args[0].dtype, device=owner.device), *args[1:], **kwargs)
    if name in _NEEDS_VALUES or (target is not None and not _lacks_values(target)):
        refuse(name, owner)
    with _Draws() as draws:
        result = _on_meta(func, name, owner, args, kwargs)
    if draws.found:
        _draw(func, name, owner, args, kwargs, target)
    if target is not None:
        return target
    return tree_map(lambda leaf: without_values(leaf, owner) if isinstance(leaf, Tensor) else leaf, result)


def _caller() -> str:
    """The module of the code that computes with a guarded tensor."""
    frame: Any = sys._getframe()
    while frame.f_globals.get("__name__", "").startswith("lightning_hanayo."):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))


class _Draws(TorchDispatchMode):
    """Finds whether a function draws random numbers, by the operations that it consists of."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _on_meta(func: Callable[..., Any], name: str, owner: Owner, args: Any, kwargs: Any) -> Any:
    def to_meta(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("meta")
        if isinstance(leaf, torch.Generator):
            return None
        return torch.empty_like(_without_class(leaf), device="meta") if isinstance(leaf, Tensor) else leaf

    if name in _TO_DEVICE:
        return args[0]
    if name == "to" and len(args) > 1 and isinstance(args[1], str):
        args = (args[0], torch.device("meta"), *args[2:])
    if "device" in kwargs:
        kwargs = kwargs | {"device": torch.device("meta")}
    try:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            on_meta = tree_map(to_meta, (args, kwargs))
            return func(*on_meta[0], **on_meta[1])
    except (NotImplementedError, RuntimeError, TypeError) as error:
        has_part = any(isinstance(leaf, partial_values.OfPart) for leaf in tree_leaves((args, kwargs)))
        if not isinstance(error, NotImplementedError) and "meta" not in str(error) and not has_part:
            raise  # the user's mistake, such as shapes that don't fit
        refuse(name, owner, error)


def _draw(func: Callable[..., Any], name: str, owner: Owner, args: Any, kwargs: Any, target: Any) -> None:
    """Draw the random numbers that the owner draws, so that all ranks continue alike; keep them if they fill `target`.

    Raises:
        UnsupportedError: how many numbers they are depends on missing values.
    """
    leaves, drawn = tree_leaves((args, kwargs)), owner.drawn
    generators = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)] or [default_generator(owner.device)]
    missing = {id(leaf): _without_class(leaf) for leaf in leaves if isinstance(leaf, Tensor) and _lacks_values(leaf)}

    def run(number: float) -> dict[int, Tensor]:
        given = dict.fromkeys(missing, number)
        if target is not None and missing[id(target)].is_floating_point():
            given[id(target)] = nan  # a remaining one shows that the function doesn't fill the target
        real = {key: torch.full_like(one, given[key], device=owner.device) for key, one in missing.items()}
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            with_numbers = tree_map(lambda leaf: real.get(id(leaf), _without_class(leaf)), (args, kwargs))
            func(*with_numbers[0], **with_numbers[1])
        return real

    before = [generator.get_state() for generator in generators]
    real = run(_NUMBERS[0])
    if missing.keys() == {id(target)}:
        numbers = real[id(target)]
        if numbers.is_floating_point() and not numbers.isnan().any():
            drawn.target, drawn.numbers = target, numbers
    elif func not in drawn.compared:
        after = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)
        run(_NUMBERS[1])
        if not all(torch.equal(one.get_state(), state) for one, state in zip(generators, after, strict=True)):
            refuse(name, owner)
        drawn.compared.add(func)


def _without_class(leaf: Any) -> Any:
    return leaf.detach().as_subclass(Tensor) if isinstance(leaf, Tensor) else leaf


def _lacks_values(target: Any) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return all(leaf.is_meta for leaf in tree_leaves(target) if isinstance(leaf, Tensor))


def _owners(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Owner]:
    leaves = tree_leaves((args, kwargs))
    return (leaf._owner for leaf in leaves if isinstance(leaf, _OfOwner))


def refuse(name: str, owner: Owner, cause: Exception | None = None, *, alone: bool = False) -> NoReturn:
    """Raise the error of user code that needs values here, or runs where the owner can't do the same."""
    where = "this code runs on pipeline rank 0 alone" if alone else _NEEDED
    way_out = owner.way_out
    if alone and (module := _module_elsewhere()) is not None:
        way_out = (
            f"It is code of {type(module).__name__}, inside a block or in another method than forward. Call the block, "
            f"and do the rest in its forward; or let the modules of a list of Sequentials be the blocks: "
            f"blocks='layers[*]'. Code that computes with parameters alone can use {partial_values.FULL_PARAMETER}"
        )
    raise UnsupportedError(_refusal(name, owner, where, way_out)) from cause


def _refusal(name: str, owner: Owner, where: str, way_out: str) -> str:
    return f"{owner.name} is on pipeline rank {owner.rank}, but {where} ({name}). {way_out}."


def _module_elsewhere() -> nn.Module | None:
    """The outermost module that runs in this thread though other pipeline ranks have all of its parameters."""
    found, frame = None, inspect.currentframe()
    while frame is not None:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        module = frame.f_locals.get(names[0]) if names else None
        parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
        if parameters and all(isinstance(one, Placeholder) for one in parameters):
            found = module
        frame = frame.f_back
    return found


class _OfOwner(partial_values.Guarded):
    """The base class of both: values that this rank doesn't have."""

    compute = staticmethod(compute_without_values)
    _owner: Owner

    def __copy__(self) -> "MissingValues":
        """A copy has no values either."""
        return without_values(self, self._owner)


class MissingValues(_OfOwner):
    """Computed from parameters of another pipeline rank: a shape and a dtype, on the meta device."""

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        """Say where the values are."""
        return f"<{tuple(self.shape)} from {self._owner.name} on pipeline rank {self._owner.rank}>"


class GuardedPlaceholder(_OfOwner, partial_values.GuardedParameter, Placeholder):
    """A placeholder while user code runs: it has this class only then. `user_code` is set by a subclass.

                                                on the owner          here
        for p in self.parameters():
            p.data.div_(p.norm())               done                  nothing: the result belongs to the owner's p
        total = sum(p.norm() for p in ...)      only its own known    a `MissingValues`
        float(total), own.mul_(total)           refused here, by the name of the parameter and its rank

    So a loop that runs on all ranks is exact where each parameter depends on itself and on numbers alone: each owner
    does its own part, with real values only. Everything else needs a value that isn't here, and is an error.

    Random numbers are drawn here as on the owner, so that all ranks continue alike. A tensor that was filled with them
    has values here, too, until the next one is filled: `nn.init.trunc_normal_` looks at its random numbers.
    """

    user_code: ParameterGuard | None = None
    """the guard of the run; None between runs"""
    pickled_class: ClassVar[type[nn.Parameter] | None] = Placeholder

    @classmethod
    def compute(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the result's shape, where the owner computes the values.

        Raises:
            UnsupportedError: `func` needs the values, or the owner doesn't run this code.
        """
        name, guard = partial_values.name_of(func, args, kwargs), cls.user_code
        reads_metadata = name in partial_values.METADATA and name != "requires_grad_"
        if guard is not None and not reads_metadata and not guard.runs_on_all_ranks:
            refuse(name, next(_owners(args, kwargs)), alone=True)
        if guard is not None and name == "grad":
            exists = args[0].requires_grad and guard.has_gradients()
            return without_values(args[0], args[0]._owner) if exists else None
        return compute_without_values(func, args, kwargs)

    def __repr__(self, *_: Any, **__: Any) -> str:  # type: ignore[override]
        """Say where the values are."""
        return f"<parameter {self._owner.name} {tuple(self.shape)}, on pipeline rank {self._owner.rank}>"

    def refusal(self, name: str) -> str:
        """Says where the values are."""
        return _refusal(name, self._owner, _NEEDED, self._owner.way_out)


WAY_OUT = (
    "Call model = trainer.strategy.gather_model() on all ranks: it returns a whole, ordinary copy on rank 0, and None "
    "elsewhere. trainer.save_checkpoint(path), too, writes whole values."
)


class _AfterRun(partial_values.GuardedParameter):
    """Between two runs only attributes that need no values can be read; a pickled copy is such a parameter, too."""

    pickled_class: ClassVar[type[nn.Parameter] | None] = None

    @classmethod
    def compute(cls, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read attributes that need no values.

        Raises:
            UnsupportedError: `func` needs values.
        """
        if (name := partial_values.name_of(func, args, kwargs)) not in partial_values.METADATA:
            parameter = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _AfterRun))
            raise UnsupportedError(parameter.refusal(name))
        return super().compute(func, args, kwargs)

    def refusal(self, name: str) -> str:
        """Says where the values are, and that the run has ended."""
        own: Any = self
        if isinstance(self, PlaceholderAfterRun):
            where = f"{own._owner.name} is on pipeline rank {own._owner.rank}"
        else:
            shape = partial_values.own_shape(self)
            where = f"{own._part.name}: this rank holds a part of shape {shape} of the whole {own._part.shape}"
        return f"{where}, and the run has ended ({name}). {WAY_OUT}"


class PlaceholderAfterRun(_AfterRun, GuardedPlaceholder):
    """A placeholder between two runs."""


class PartAfterRun(_AfterRun, partial_values.PartialParameter):
    """A parameter of which this rank holds a part, between two runs."""


def guard(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse user code that computes with these parameters, which a `ParameterGuard` has watched in a run."""
    for parameter in parameters:
        vars(parameter)["_own_class"] = type(parameter)
        parameter.__class__ = PlaceholderAfterRun if isinstance(parameter, Placeholder) else PartAfterRun


def release(module: nn.Module) -> list[nn.Parameter]:
    """Give the module's parameters, or a copy's, their own classes back; return those that were guarded."""
    guarded: list[nn.Parameter] = [p for p in module.parameters() if isinstance(p, _AfterRun)]
    for parameter in guarded:
        parameter.__class__ = vars(parameter).pop("_own_class")
    return guarded


@contextmanager
def released(module: nn.Module) -> Iterator[None]:
    """Inside it, code that knows of parts and placeholders finds plain ones."""
    guarded = release(module)
    try:
        yield
    finally:
        guard(guarded)

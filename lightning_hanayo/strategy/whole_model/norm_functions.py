"""Lets torch's and Lightning's functions for norms and clipping see the whole model, for the time of a run.

clip_grad_norm_(parameters)  ->  of a running module?  yes: GradientNorms, over all ranks
                                                       no:  torch's own code

Users import these functions by name, so replacing them in their modules would come too late. What is replaced is the
code object of the function itself, under its decorators. Parameters that belong to no run are treated as always.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.whole_model.gradient_norms import GradientNorms, OwnGradient

Original = Callable[..., Any]
Tensors = Tensor | Iterable[Tensor]


@dataclass(frozen=True)
class _Replaced:
    """A function whose code is replaced: its own code, a copy of it that runs as always, and what it does for a run."""

    function: FunctionType
    code: CodeType
    original: Original
    for_run: Callable[..., Any]


_running: list[GradientNorms] = []
_replaced: dict[str, _Replaced] = {}


def start(norms: GradientNorms) -> None:
    """From now on, the functions give the whole model's values for this module's parameters.

    Raises:
        UnsupportedError: this version of torch or Lightning defines one of them in another way.
    """
    if not _running:
        _replace()
    _running.append(norms)


def stop(norms: GradientNorms) -> None:
    """End what `start` has begun. After the last run the functions are as they were. A second call does nothing."""
    if norms in _running:
        _running.remove(norms)
        if not _running:
            _restore()


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call one of the functions. The code that takes the place of theirs calls this."""
    one = _replaced[name]
    bound = inspect.signature(one.original).bind(*args, **kwargs)
    bound.apply_defaults()
    with ExitStack() as stack:
        for run in _running:
            stack.enter_context(run.unguarded())
        return one.for_run(one.original, *bound.arguments.values())


def _replace() -> None:
    plain = {_plain(function): for_run for function, for_run in _FUNCTIONS.items()}
    originals: dict[str, Original] = {}
    for function, for_run in plain.items():
        name, scope = function.__name__, function.__globals__ | originals  # torch's call each other: the originals
        originals[name] = FunctionType(function.__code__, scope, name, function.__defaults__)
        _replaced[name] = _Replaced(function, function.__code__, originals[name], for_run)
    for name, one in _replaced.items():
        one.function.__code__ = _replacement.__code__.replace(co_name=name)


def _restore() -> None:
    for one in _replaced.values():
        one.function.__code__ = one.code
    _replaced.clear()


def _plain(function: Callable[..., Any]) -> FunctionType:
    """The function under its decorators."""
    plain = inspect.unwrap(function)
    if isinstance(plain, FunctionType) and not plain.__code__.co_freevars and not plain.__kwdefaults__:
        return plain
    raise UnsupportedError(
        f"{function.__name__} isn't a plain function in torch {torch.__version__}, or another package has replaced it, "
        f"so it can't be made to see the gradients of other ranks. Use torch 2.10 to 2.13, without such a package."
    )


def _replacement(*args: Any, **kwargs: Any) -> Any:
    """Runs with the globals of the function whose code it replaces: so it imports what it needs."""
    import sys

    from lightning_hanayo.strategy.whole_model.norm_functions import call

    return call(sys._getframe().f_code.co_name, *args, **kwargs)


def _clip_grad_norm(
    original: Original,
    parameters: Tensors,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> Tensor:
    listed = _listed(parameters)
    found = _run_of("clip_grad_norm_", listed)
    if found is None:
        result: Tensor = original(listed, max_norm, norm_type, error_if_nonfinite, foreach)
        return result
    run, listed = found
    total = run.total(run.gradients_of(listed), float(norm_type), foreach=foreach)
    _check_finite(total, norm_type, error_if_nonfinite)
    _replaced["_clip_grads_with_norm_"].original(_own(listed), max_norm, total, foreach)
    return total


def _get_total_norm(
    original: Original, tensors: Tensors, norm_type: float, error_if_nonfinite: bool, foreach: bool | None
) -> Tensor:
    listed = _listed(tensors)
    found = _gradients_among(listed)
    if found is None:
        result: Tensor = original(listed, norm_type, error_if_nonfinite, foreach)
        return result
    run, gradients = found
    total = run.total(gradients, float(norm_type), foreach=foreach)
    _check_finite(total, norm_type, error_if_nonfinite)
    return total


def _clip_each(name: str) -> Callable[..., None]:
    """A function that treats each gradient alone: it only has to leave out other ranks' placeholders."""

    def clip(original: Original, parameters: Tensors, *args: Any) -> None:
        listed = _listed(parameters)
        found = _run_of(name, listed)
        original(listed if found is None else _own(found[1]), *args)

    return clip


def _grad_norm(
    original: Original, module: nn.Module, norm_type: float | str, group_separator: str
) -> dict[str, float | Tensor]:
    named = list(module.named_parameters())
    found = _run_of("grad_norm", [parameter for _, parameter in named]) if named else None
    if found is None or float(norm_type) <= 0:
        result: dict[str, float | Tensor] = original(module, norm_type, group_separator)
        return result
    run, parameters = found
    order = float(norm_type)
    of = run.by_parameter(run.gradients_of(parameters), order)
    norms = {f"grad_{order}_norm{group_separator}{name}": of[parameter] for name, parameter in named if parameter in of}
    if not norms:
        return {}
    return {**norms, f"grad_{order}_norm_total": torch.tensor(list(norms.values())).norm(order)}


_FUNCTIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    get_total_norm: _get_total_norm,
    clip_grads_with_norm_: _clip_each("clip_grads_with_norm_"),
    clip_grad_norm_: _clip_grad_norm,
    clip_grad_value_: _clip_each("clip_grad_value_"),
    grad_norm: _grad_norm,
}
"""what each function does for a run; those that others call come first"""


def _listed(tensors: Tensors) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _own(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those that this rank holds."""
    return [parameter for parameter in parameters if not parameter.is_meta]


def _run_of(function: str, passed: Sequence[Tensor]) -> tuple[GradientNorms, list[Tensor]] | None:
    """The run to whose module the parameters belong, and the parameters; None: they belong to none.

    An empty list belongs to the run: a rank that holds nothing of what the user has selected takes part, too.

    Raises:
        UnsupportedError: they belong to the run only in part, or a step is running.
    """
    for run in reversed(_running):
        parameters = run.without_guards(passed)
        others = [parameter for parameter in parameters if not run.includes(parameter)]
        if parameters and len(others) == len(parameters):
            continue
        _check_not_mixed(function, parameters, others)
        if parameters or not run.in_batch:
            run.check_outside_batch(function)
            return run, parameters
    return None


def _gradients_among(tensors: Sequence[Tensor]) -> tuple[GradientNorms, list[OwnGradient]] | None:
    """The run to whose module these gradients (or parameters) belong; None: they belong to none.

    What is on the meta device stands for other ranks' gradients.
    """
    for run in reversed(_running):
        found = run.recognize(tensors)
        others = [t for t, one in zip(tensors, found, strict=True) if one is None and t.numel() and not t.is_meta]
        if tensors and len(others) == len(tensors):
            continue
        _check_not_mixed("get_total_norm", tensors, others)
        if tensors or not run.in_batch:
            run.check_outside_batch("get_total_norm")
            return run, [gradient for gradient in found if gradient is not None]
    return None


def _check_not_mixed(function: str, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    if others:
        raise UnsupportedError(
            f"{function} was called on {len(tensors) - len(others)} parameters or gradients of the module together "
            f"with {len(others)} other tensors (the first has the shape {tuple(others[0].shape)}), and it isn't known "
            f"which rank counts. Call it on them separately, or make them parameters of the module before the run."
        )


def _check_finite(total: Tensor, norm_type: float, error_if_nonfinite: bool) -> None:
    """Raise torch's own error."""
    _replaced["_get_total_norm"].original([total], norm_type, error_if_nonfinite)

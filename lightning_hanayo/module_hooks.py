"""Hooks that users have put on modules and parameters, which would run elsewhere or more often than they think."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError

_KINDS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN_MODULE_ONLY = ("torch.", "transformers.", "peft.", "lightning.pytorch.profilers.", "lightning_hanayo.")
"""hooks of these packages read, change or time the module that they are on, or do nothing without a request"""


def check_hooks(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Reject hooks on these named modules that may store values for code on another rank.

    A hook whose attribute `is_local` is true is accepted: it declares that it only uses its own module.

    Raises:
        UnsupportedError: there is one.
    """
    for name, module in modules:
        advice = "the step never sees what it stores. Store it in the block's forward; if it only uses its module, set"
        _check(name, (getattr(module, kind) for kind in _KINDS), advice)


def check_parameter_hooks(parameters: Mapping[str, Tensor]) -> None:
    """Reject hooks on these parameters: they would see the gradients of single micro-batches, in a cube of parts.

    A hook whose attribute `is_local` is true is accepted.

    Raises:
        UnsupportedError: there is one.
    """
    for name, parameter in parameters.items():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            kinds = filter(None, (parameter._backward_hooks, parameter._post_accumulate_grad_hooks))
            advice = (
                "it would run once for each micro-batch. Use on_before_optimizer_step; if it only scales gradients, set"
            )
            _check(name, kinds, advice)


def _check(owner: str, kinds: Iterable[Mapping[int, Any]], advice: str) -> None:
    for hook in (hook for hooks in kinds for hook in hooks.values() if not _is_local(hook)):
        told = _describe(hook)
        raise UnsupportedError(f"{owner} has the hook {told}: {advice} {told.split(' ')[0]}.is_local = True.")


class HookCount:
    """Counts the hooks on modules; 0.1 us per module."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._dictionaries = [getattr(module, kind) for module in modules for kind in _KINDS]

    def __call__(self) -> int:
        """The number of hooks now."""
        return sum(map(len, self._dictionaries))


def _function(hook: Any) -> Any:
    while isinstance(hook, partial):
        hook = hook.func
    return hook


def _is_local(hook: Any) -> bool:
    hook = _function(hook)
    origin = getattr(hook, "__module__", None) or type(hook).__module__
    return bool(getattr(hook, "is_local", False)) or f"{origin}.".startswith(_OWN_MODULE_ONLY)


def _describe(hook: Any) -> str:
    hook = _function(hook)
    code = getattr(hook, "__code__", None)
    name = getattr(hook, "__name__", type(hook).__name__)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code is not None else name

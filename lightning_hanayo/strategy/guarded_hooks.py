"""Guards parameters while hooks run that the user's module or callbacks define, for the time of a run.

    module    on_train_batch_end: the user's          ours on the instance: enter the guard, call the user's, leave it
    callback  on_train_batch_end: Lightning's         stays as it is

Hooks stay overridden in Lightning's eyes, and copies of module and callbacks are bound to themselves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partition.guards import MissingValues, ParameterGuard, Scope
from lightning_hanayo.strategy.lightning.loaders import PlaceholderBatch
from lightning_hanayo.strategy.lightning.user_hooks import callbacks_of, is_lightnings
from lightning_hanayo.strategy.patches import Substitute
from lightning_hanayo.strategy.run import Run

_STAGES = ("train", "validation", "test", "predict")
_TIMES = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end", "model_eval", "model_train")
_BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_HOOKS = (
    *(f"on_{stage}_{when}" for stage in _STAGES for when in _TIMES),
    "on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end", "on_validation_model_zero_grad",
    "on_before_backward", "on_after_backward", "on_before_zero_grad", "on_before_optimizer_step",
    "configure_gradient_clipping", "optimizer_step", "on_save_checkpoint", "configure_optimizers", "backward",
    "optimizer_zero_grad", "lr_scheduler_step", *_BATCH_HOOKS,
)  # fmt: skip
"""in which user code alone runs, or calls code that enters `ParameterGuard.off`"""
_ON_FIRST_RANK = frozenset((*_BATCH_HOOKS, *(f"on_{stage}_epoch_end" for stage in _STAGES[1:])))
"""hooks of the module that the pipeline ranks above 0 skip, as they have no data"""
_WRITES = ("write_on_batch_end", "write_on_epoch_end")
"""hooks of a `BasePredictionWriter`, which get predictions"""

BEFORE_BATCHES = tuple(f"on_{stage}_batch_start" for stage in _STAGES)
"""hooks that run on all ranks between the reading of a batch and its steps"""
AFTER_BATCHES = (
    *BEFORE_BATCHES, *(f"on_{stage}_batch_end" for stage in _STAGES), "on_before_backward", "backward",
    "on_before_zero_grad", "on_after_backward", "on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad",
    "configure_gradient_clipping", "lr_scheduler_step",
)  # fmt: skip
"""hooks that may read, on all ranks, values that the steps of a batch have set"""
AFTER_EPOCHS = (
    *AFTER_BATCHES, "on_fit_end",
    *(f"on_{stage}_{when}" for stage in _STAGES for when in _TIMES if "batch" not in when),
)  # fmt: skip
"""hooks that may read, on all ranks, values that steps have set"""


def _skip(*_: Any) -> None:
    """Called where another rank writes the predictions: files with one name would replace each other."""


def _guarded(
    name: str, hook: Callable[..., Any], guard: ParameterGuard, scope: Scope, at_end: Callable[[], object] = bool
) -> Substitute:
    """Takes the place of a hook on an instance. `at_end` is called after it, unless it may exist on some ranks only."""

    def run(hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(arg.content if isinstance(arg, PlaceholderBatch) else arg for arg in args)
        with guard.hook(scope, name):
            result = hook(*args, **kwargs)
        at_end()
        return result

    return Substitute(hook, run, name)


def _checked_log(has_metrics: bool, log: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
    """Takes the place of `log`: logged values are needed on pipeline rank 0, whose metrics all ranks get."""
    if isinstance(value, MissingValues):
        value = value.item() if has_metrics else torch.zeros(value.shape)
    log(name, value, *args, **kwargs)


def guard_hooks(run: Run, end_hook: Callable[[], object] = bool) -> None:
    """Enter the guard in all hooks that the user has defined. `end_hook` is called after the module's on all ranks."""
    module, is_pipe = run.module, run.topology.pipe > 1
    if is_pipe:
        run.attributes.wrap(module, "log", partial(_checked_log, run.pipe_rank == 0))
    for owner in (module, *callbacks_of(run.trainer)):
        for name in _HOOKS:
            is_alone = owner is module and is_pipe and name in _ON_FIRST_RANK
            at_end = end_hook if owner is module and not is_alone else bool
            guard_hook(run, owner, name, "alone" if is_alone else "hook", at_end)


def guard_writers(run: Run) -> None:
    """Let predictions be written once: by one rank of those that train a copy of the model."""
    writers = [one for one in callbacks_of(run.trainer) if isinstance(one, BasePredictionWriter)]
    for writer, name in product(writers, _WRITES):
        if run.replica_relay.transport.rank == 0:
            guard_hook(run, writer, name, "alone" if run.topology.replica_size > 1 else "hook")
        else:
            run.attributes.set(writer, name, _skip)


@contextmanager
def guarded_step_hooks(optimizer: Any, guard: ParameterGuard, *, why_not: str | None = None) -> Iterator[None]:
    """Inside it, hooks on the optimizer's steps run guarded, but for those of this package.

    Raises:
        UnsupportedError: there are others, and a reason `why_not`.
    """
    replaced = []
    all_hooks: tuple[dict[int, Callable[..., Any]], ...] = ()
    if isinstance(optimizer, Optimizer):  # Lightning takes other classes, too
        of_all = torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks
        all_hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks, *of_all)
    for hooks in all_hooks:
        for key, hook in hooks.items():
            if not str(getattr(hook, "__module__", "")).startswith("lightning_hanayo."):
                if why_not is not None:
                    what = f"{type(optimizer).__name__} has a hook on its steps, {getattr(hook, '__qualname__', hook)}"
                    raise UnsupportedError(f"{what}: {why_not}. Use on_before_optimizer_step, or on_train_batch_end.")
                replaced.append((hooks, key, hook))
                hooks[key] = _guarded("a hook on the optimizer's steps", hook, guard, "hook")
    try:
        yield
    finally:
        for hooks, key, hook in replaced:
            if key in hooks:  # it may have removed itself
                hooks[key] = hook


def guard_hook(run: Run, owner: Any, name: str, scope: Scope = "hook", at_end: Callable[[], object] = bool) -> None:
    """Guard one hook, if it is the user's: set on the instance, or defined by a class outside Lightning.

    One that a class defines is bound by `MethodType`, as pickle and deepcopy know it. One that the user has set on the
    instance isn't, and copies have the user's again.
    """
    is_on_instance = vars(owner).get(name) is not None
    hook = vars(owner)[name] if is_on_instance else getattr(type(owner), name, None)
    if callable(hook) and not is_lightnings(hook):
        guarded = _guarded(name, hook, run.guard, scope, at_end)
        run.attributes.set(owner, name, guarded if is_on_instance else MethodType(guarded, owner))

"""Which hooks the user's module, callbacks and precision plugin define: what is unused needn't be prepared for."""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from types import CodeType, FunctionType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers.logger import DummyLogger, Logger
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

_READ_LOSS = ("on_train_batch_end", "on_before_backward", "backward", "optimizer_step")
"""hooks of the module that get the step's loss, `optimizer_step` from its closure"""
_SEE_GRADIENTS = (
    "backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step",
    "on_before_zero_grad", "optimizer_zero_grad",
)  # fmt: skip
"""hooks between which and the optimizer's step gradients are complete"""
_OWN_PACKAGES = ("lightning.", "lightning_hanayo.")


def takes_dataloader_iter(module: "pl.LightningModule") -> bool:
    """Whether `training_step` takes the loader's iterator."""
    step: Any = module.training_step  # the Trainer checks later whether it is a function
    return callable(step) and is_param_in_hook_signature(step, "dataloader_iter", explicit=True)


def defines_configure_model(module: "pl.LightningModule") -> bool:
    """Whether the model is built in `configure_model`, after the processes have started."""
    return is_overridden("configure_model", module)


def example_run(module: "pl.LightningModule", device: torch.device) -> Callable[[], object]:
    """Returns a function that runs `forward` on the module's `example_input_array`, on `device`."""
    precision = module.trainer.precision_plugin
    example = precision.convert_input(move_data_to_device(module.example_input_array, device))
    is_named = isinstance(example, dict)
    arguments = () if is_named else example if isinstance(example, (tuple, list)) else (example,)

    def run() -> None:
        with precision.forward_context():
            module(*arguments, **(example if is_named else {}))

    return run


def user_defines(trainer: "pl.Trainer", *hooks: str) -> bool:
    """Whether the module or a callback of the user's defines one of the hooks."""
    return any(defines(owner, *hooks) for owner in (trainer.lightning_module, *callbacks_of(trainer)))


def defines(owner: Any, *hooks: str) -> bool:
    """Whether the user defines one of the hooks in the owner's class, or on the instance, where it may be anything."""
    for hook in hooks:
        of_class = getattr(type(owner), hook, None)
        if hook in vars(owner) or (of_class is not None and not is_lightnings(of_class)):
            return True
    return False


def is_lightnings(one: Callable[..., Any]) -> bool:
    """Whether a hook or class is defined by Lightning, or by this package."""
    return (getattr(one, "__module__", None) or "").startswith(("pytorch_lightning.", *_OWN_PACKAGES))


def clips_by_norm(trainer: "pl.Trainer", module: "pl.LightningModule") -> bool:
    """Whether all ranks wait for each other before each optimizer step, for the norm of the whole gradient."""
    if defines(module, "configure_gradient_clipping"):
        return True
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE


def may_scale_backward(trainer: "pl.Trainer") -> bool:
    """Whether user code may send an unexpected gradient into the loss: an override, or a precision plugin."""
    classes = type(trainer.precision_plugin).__mro__
    hooks = ("pre_backward", "backward")
    foreign = any(hook in vars(one) for hook in hooks for one in classes if not is_lightnings(one))
    return foreign or user_defines(trainer, "backward", "on_before_backward")


def may_read_gradients(trainer: "pl.Trainer") -> bool:
    """Whether `.grad` stands in the user's classes of the module, or in a function that their files define or import.

    Then those of the last step are kept for the steps of all micro-batches, which takes memory.
    """
    module_class: Any = type(trainer.lightning_module)
    return _mentions_gradients(module_class)


def may_see_gradients(trainer: "pl.Trainer") -> bool:
    """Whether user code may look at gradients between the backward and the optimizer's step, or after it.

    A hook there, `.grad` in the classes of the module or a callback or in a function of their files, or a step of
    manual optimization.
    """
    if not trainer.lightning_module.automatic_optimization or user_defines(trainer, *_SEE_GRADIENTS):
        return True
    classes: list[Any] = [*map(type, (trainer.lightning_module, *callbacks_of(trainer)))]
    return any(_mentions_gradients(one) for one in classes if not is_lightnings(one))


@cache
def _mentions_gradients(module_class: Any) -> bool:
    classes = [
        one for one in module_class.__mro__ if not one.__module__.startswith(("torch.", "builtins", *_OWN_PACKAGES))
    ]
    methods = [method for one in classes for method in _functions(vars(one))]
    files = {id(method.__globals__): method.__globals__ for method in methods}.values()  # not all are in sys.modules
    functions = chain(methods, *map(_functions, files))
    return any("grad" in _names(function.__code__) for function in functions)


def _functions(scope: Mapping[str, Any]) -> list[FunctionType]:
    unwrapped = (inspect.unwrap(value) for value in scope.values() if inspect.isroutine(value))
    return [value for value in unwrapped if inspect.isfunction(value)]


def _names(code: CodeType) -> set[str]:
    """All attributes and globals that the code uses, with those of functions and classes inside it."""
    inside = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inside)


def reads_step_metrics(trainer: "pl.Trainer", batch_idx: int, *, steps: bool) -> bool:
    """Whether a callback or a scheduler reads metrics at the end of this batch. The same on all ranks.

    Lightning's own callbacks read them when they save. For a user's callback it isn't known, so any that defines
    `on_train_batch_end` or `on_before_backward` counts.

    Args:
        trainer: whose callbacks are asked.
        batch_idx: the batch's number in the epoch.
        steps: whether the optimizer steps after this batch.
    """
    plateaus = (c for c in trainer.strategy.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step")
    if steps and any((batch_idx + 1) % config.frequency == 0 for config in plateaus):
        return True
    if defines(trainer.lightning_module, *_READ_LOSS):
        return True
    return any(_reads_metrics(trainer, callback, steps=steps) for callback in callbacks_of(trainer))


def _reads_metrics(trainer: "pl.Trainer", callback: "pl.Callback", *, steps: bool) -> bool:
    if isinstance(callback, ModelCheckpoint):
        every = callback._every_n_train_steps  # metrics that it monitors, or puts into a file's name
        due = steps and every > 0 and (trainer.global_step + 1) % every == 0
        return due or callback._train_time_interval is not None
    if isinstance(callback, SpikeDetection):  # the loss, which Lightning gives it
        return True
    return defines(callback, "on_train_batch_end", "on_before_backward")


UPLOADS, DRAWS = "_log_model", "_log_graph"
"""options of loggers"""


def loggers_with(trainer: "pl.Trainer", option: str) -> list[Logger]:
    """Lightning's loggers that upload the files that `ModelCheckpoint` saves, or draw the graph of the model."""
    real = (one for one in trainer.loggers if not isinstance(one, DummyLogger))  # of fast_dev_run: has all attributes
    return [one for one in real if getattr(one, option, False)]


def averaged_copies(trainer: "pl.Trainer") -> dict["pl.Callback", torch.nn.Module]:
    """The copies of the module in which callbacks average its weights."""
    models: dict[pl.Callback, Any] = averaging_models(trainer)
    return {one: model.module if isinstance(one, WeightAveraging) else model for one, model in models.items()}


def averaging_models(trainer: "pl.Trainer") -> "dict[pl.Callback, torch.nn.Module]":
    """Those copies, or torch's `AveragedModel` around them."""
    found: dict[pl.Callback, Any] = {one: one._average_model for one in averaging_callbacks(trainer)}
    return {callback: model for callback, model in found.items() if model is not None}


def averaging_callbacks(trainer: "pl.Trainer") -> list[WeightAveraging | StochasticWeightAveraging]:
    """The callbacks that average the module's weights in a copy of it."""
    return [one for one in callbacks_of(trainer) if isinstance(one, WeightAveraging | StochasticWeightAveraging)]


def callbacks_of(trainer: "pl.Trainer") -> list["pl.Callback"]:
    """The Trainer's callbacks, typed."""
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # only a connector declares this attribute
    return callbacks

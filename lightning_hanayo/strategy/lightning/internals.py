"""Lightning's internals: small things that only Lightning's private side (2.6.6) gives or takes.

What a new release breaks is mended here, in `logging`, `shared_metrics` or `launcher`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def keep_sigterm_local(trainer: "pl.Trainer", changes: TemporaryAttributes) -> None:
    """No collective for SIGTERM, neither before each batch nor in the signal's handler.

    The first drains the pipe with a host sync per batch (Lightning issue #21487); the second hangs all ranks that the
    signal meets in different places (#20806). A rank that got the signal leaves after its batch, the others follow it.
    """

    def note(signum: int, _: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not trainer.received_sigterm:
            launcher.kill(signum)
        trainer._signal_connector.received_sigterm = True

    changes.set(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", _nothing)
    changes.set(trainer._signal_connector, "_sigterm_notifier_fn", note)


def takes_dataloader_iter(module: "pl.LightningModule") -> bool:
    """Whether `training_step` wants the loader's iterator."""
    return is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True)


def defines_model_late(module: "pl.LightningModule") -> bool:
    """Whether the model is built in `configure_model`, after the processes have started."""
    return is_overridden("configure_model", module)


def example_of(module: "pl.LightningModule") -> Callable[[], object] | None:
    """Runs `forward` on the module's `example_input_array`, which holds its arguments; None without one."""
    array = module.example_input_array
    if array is None:
        return None
    if isinstance(array, dict):
        return partial(module, **array)
    return partial(module, *(array if isinstance(array, (tuple, list)) else [array]))


def clips_by_norm(trainer: "pl.Trainer", module: "pl.LightningModule") -> bool:
    """Whether all ranks wait for each other before each optimizer step, for the norm of the whole gradient."""
    if overrides(module, "configure_gradient_clipping"):
        return True
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE


def logged_step(trainer: "pl.Trainer") -> int:
    """What loggers get as the step of the batch that ends now, beside Lightning's own metrics."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def expected_gradient(trainer: "pl.Trainer") -> float:
    """What Lightning's backward will send into the loss that `training_step` returns."""
    return 1.0 / trainer.accumulate_grad_batches


def may_scale_backward(trainer: "pl.Trainer") -> bool:
    """Whether user code may send another gradient into the loss than `expected_gradient`: an override or a plugin."""
    module, precision = trainer.lightning_module, trainer.precision_plugin
    hooks = ("pre_backward", "backward")
    foreign = any(name in vars(base) for name in hooks for base in type(precision).__mro__ if not _is_lightnings(base))
    return foreign or overrides(module, "backward") or listens(trainer, "on_before_backward")


def _is_lightnings(kind: type) -> bool:
    return kind.__module__.startswith(("lightning.", "lightning_hanayo."))


def overrides(module: "pl.LightningModule", hook: str) -> bool:
    """Whether the module has a `hook` of its own, in its class or on the instance, where it may be any callable."""
    return hook in vars(module) or getattr(type(module), hook) is not getattr(pl.LightningModule, hook)


def listens(trainer: "pl.Trainer", hook: str) -> bool:
    """Whether the module or a callback has a `hook` of its own."""
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # an attribute that only a connector declares
    return overrides(trainer.lightning_module, hook) or any(
        getattr(type(callback), hook) is not getattr(pl.Callback, hook) or hook in vars(callback)
        for callback in callbacks
    )


def looks_at_old_gradients(trainer: "pl.Trainer") -> bool:
    """Whether a hook may look at the last step's gradients before they are zeroed. Else they needn't be kept."""
    return overrides(trainer.lightning_module, "optimizer_zero_grad") or listens(trainer, "on_before_zero_grad")


def batch_key(trainer: "pl.Trainer") -> str:
    """Names the batch under way: the same on every layout and after a resume, another one for every batch of a run.

    In training: the optimizer step and the batch's place among those that are accumulated for it. In evaluation: the
    step after which it takes place and the batch's place in it.
    """
    stage = trainer.state.stage
    assert stage is not None
    if trainer.training:
        place = trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1
        return f"{stage.value} {trainer.global_step} {place % trainer.accumulate_grad_batches}"
    loop: Any = trainer._active_loop
    return f"{stage.value} {trainer.global_step} {loop.batch_progress.current.ready - 1}"


def continues_accumulation(trainer: "pl.Trainer", batch_idx: int) -> bool:
    """Whether Lightning won't zero gradients for this batch."""
    return batch_idx % trainer.accumulate_grad_batches != 0


_EVALUATION_ENDS = ("on_validation_epoch_end", "on_test_epoch_end", "on_predict_epoch_end")


def skip_hooks_without_data(module: "pl.LightningModule", changes: TemporaryAttributes) -> None:
    """On a rank that gets no data: batch transfer has nothing to work on, and no step has collected anything.

    What the ends of evaluation log comes from pipeline rank 0 anyway.
    """
    for hook in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"):
        changes.set(module, hook, _as_it_is)
    for hook in _EVALUATION_ENDS:
        changes.set(module, hook, _nothing)


def _as_it_is(batch: Any, *_: Any, **__: Any) -> Any:
    """Named in this file, so that the user's module can be pickled."""
    return batch


def _nothing() -> None:
    """Named in this file, so that the user's module can be pickled."""


class GatherOver:
    """torchmetrics' gathering over `group`. Copies of a metric share it; pickled ones leave it behind."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        """One tensor per rank of the group."""
        return gather_all_tensors(result, self._group)

    def __deepcopy__(self, _: Any) -> "GatherOver":
        return self

    def __reduce__(self) -> Any:
        return GatherOver, ()


def set_metric_groups(module: nn.Module, group: Any, changes: TemporaryAttributes) -> None:
    """Let torchmetrics sync over the data ranks of this pipeline rank alone."""
    for part in module.modules():
        if isinstance(part, Metric) and isinstance(part.dist_sync_fn, GatherOver | None):
            part.dist_sync_fn = None  # a copy that was made during another run still holds that run's
            changes.set(part, "dist_sync_fn", GatherOver(group))


def copy_state(metric: Metric) -> Any:
    """What a metric has seen so far."""
    return metric._copy_state_dict(), (metric._update_count, metric._computed, metric._forward_cache)


def restore_state(metric: Metric, state: Any) -> None:
    """Let a metric forget what it has seen since `copy_state`."""
    values, (metric._update_count, metric._computed, metric._forward_cache) = state
    for name, value in values.items():
        setattr(metric, name, value)


def optimizers_to_device(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the optimizers' states, but for those that some (Adagrad) make for placeholders when constructed."""
    for optimizer in optimizers:
        placeholders = {p: optimizer.state.pop(p) for p in list(optimizer.state) if p.is_meta}
        _optimizer_to_device(optimizer, device)
        optimizer.state.update(placeholders)

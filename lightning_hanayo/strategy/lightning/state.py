"""Where the Trainer is, and what it does with losses and optimizers: batch, accumulation, loss scale, wrappers.

Where the Trainer's loops are: the batch under way, its number, and its place in an accumulation.

Loss scaling of Lightning's precision plugins: one scale, and one decision to skip a step, on all ranks.

rank 0    gradients are finite     found_inf 0   --+-- all-reduce --   1, skip    scale / 2
rank 1    one gradient is inf      found_inf 1   --+                   1, skip    scale / 2

Optimizers as Lightning wraps and moves them, where some parameters are placeholders.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_hanayo.errors import UnsupportedError, available
from lightning_hanayo.partial_values import PartialValues
from lightning_hanayo.partition.guards import MissingValues
from lightning_hanayo.strategy.patches import TemporaryAttributes


def batch_idx(trainer: "pl.Trainer") -> int:
    """The number of the training batch under way in its epoch."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready - 1


def batch_key(trainer: "pl.Trainer") -> str:
    """Names the batch under way: the same on every layout and after a resume, different for every batch of a run.

    In training: the optimizer step and the batch's place among those that are accumulated for it. In evaluation: the
    step after which it takes place and the batch's number in it.
    """
    stage = trainer.state.stage
    assert stage is not None  # Lightning sets it before it runs a loop
    if trainer.training:
        return f"{stage.value} {trainer.global_step} {batch_idx(trainer) % trainer.accumulate_grad_batches}"
    loop: Any = trainer._active_loop
    return f"{stage.value} {trainer.global_step} {loop.batch_progress.current.ready - 1}"


def continues_accumulation(trainer: "pl.Trainer") -> bool:
    """Whether Lightning won't zero the gradients for this batch."""
    return batch_idx(trainer) % trainer.accumulate_grad_batches != 0


def share_of_step(trainer: "pl.Trainer") -> float:
    """Lightning's factor for a batch's loss, because the gradients of several batches accumulate."""
    return 1.0 / trainer.accumulate_grad_batches


def expected_gradient(trainer: "pl.Trainer", loss_scale: Tensor | None) -> float | Tensor:
    """The gradient that Lightning's backward will send into the loss that `training_step` returns.

    With a loss scale a tensor in fp64: whatever dtype the loss has, rounding it there gives what Lightning computes.
    """
    return share_of_step(trainer) if loss_scale is None else loss_scale.double() / trainer.accumulate_grad_batches


def logged_step(trainer: "pl.Trainer") -> int:
    """The number that loggers get as the step of the batch that ends now, for Lightning's own metrics too."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def step_name(trainer: "pl.Trainer") -> str:
    """The name of the user's step that runs."""
    if trainer.training:
        return "training_step"
    return "test_step" if trainer.testing else "predict_step" if trainer.predicting else "validation_step"


def place_in_run(trainer: "pl.Trainer") -> str:
    """Where the Trainer is, as "step 12 (training)", for reports. For any thread."""
    stage = trainer.state.stage
    name = "set-up" if stage is None else stage.name.lower().replace("_", " ")
    return f"step {trainer.global_step} ({name})" if trainer.state.fn == TrainerFn.FITTING else name


OnGradients = Callable[[Optimizer, Callable[[], object]], object]
OnUnscaled = Callable[[Optimizer, Tensor, Tensor], object]


def loss_scale(trainer: "pl.Trainer") -> Tensor | None:
    """The plugin's factor for losses before their backward, on the device, in fp32; None: it has none."""
    scaler = _scaler_of(trainer.precision_plugin)
    return None if scaler is None else scaler.scale(torch.ones((), device=trainer.strategy.root_device))


def call_before_steps(
    plugin: Precision, attributes: TemporaryAttributes, on_gradients: OnGradients, on_unscaled: OnUnscaled
) -> None:
    """Until `attributes` are restored, let the ranks agree on infinite gradients, and call these functions.

    Args:
        plugin: the Trainer's.
        attributes: restore the changes.
        on_gradients: called after hooks with a function that clips, if the plugin has no scaler.
        on_unscaled: called by the scaler with all ranks' `found_inf`, and its scale.
    """
    scaler = _scaler_of(plugin)

    def unscale(own: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any) -> Any:
        """Called for fused optimizers, and on ranks without gradients, too.

        The scaler's own method returns `found_inf` for each device on which gradients are.
        """
        for found in own(optimizer, inv_scale, found_inf, *args).values():
            found_inf += found.to(found_inf.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        assert scaler is not None
        scale = available(scaler._get_scale_async(), "the scale exists once a loss was scaled")
        on_unscaled(optimizer, found_inf, scale)
        return {found_inf.device: found_inf}

    if scaler is not None:
        attributes.wrap(scaler, "_unscale_grads_", unscale)
        return

    def clip_gradients(
        clip: Callable[..., object], model: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        on_gradients(optimizer, partial(clip, model, optimizer, *args, **kwargs))

    attributes.wrap(plugin, "_clip_gradients", clip_gradients)  # the last that is called before a step


def _scaler_of(plugin: Precision) -> GradScaler | None:
    """The plugin's gradient scaler, if it has one that is enabled."""
    scaler = getattr(plugin, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def searches_rate(trainer: "pl.Trainer") -> bool:
    """Whether `Tuner.lr_find` or `LearningRateFinder` trains now, at rates up to those at which losses are NaN."""
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def options_now(trainer: "pl.Trainer") -> list[Any]:
    """The numbers among the optimizers' options, and how far their schedulers are, as a step might change them."""
    groups = [group for optimizer in trainer.optimizers for group in unwrapped(optimizer).param_groups]
    options = [{name: value for name, value in group.items() if isinstance(value, (int, float))} for group in groups]
    return [*options, *(getattr(one.scheduler, "last_epoch", None) for one in trainer.lr_scheduler_configs)]


def check_options(trainer: "pl.Trainer", before: list[Any]) -> None:
    """Check that the steps of a batch have changed no options of optimizers, and no schedulers.

    Raises:
        UnsupportedError: they have.
    """
    if options_now(trainer) != before:
        raise UnsupportedError(
            "training_step changes an optimizer's options, or steps a scheduler. It runs for each micro-batch, on "
            "pipeline rank 0 alone: do that in on_train_batch_start, or return the scheduler with {'interval': 'step'}."
        )


@contextmanager
def refusing_steps(trainer: "pl.Trainer") -> Iterator[None]:
    """Refuse that user code steps the trainer's optimizers. For steps of micro-batches, which run more than once.

    Raises:
        UnsupportedError: when one of them steps; others, such as those of an inner loop, may.
    """
    refused = {id(unwrapped(optimizer)) for optimizer in trainer.optimizers}

    def refuse(optimizer: Optimizer, *_: Any) -> None:
        if id(optimizer) in refused:
            raise UnsupportedError(
                "training_step steps an optimizer, but runs for each micro-batch, on pipeline rank 0 alone. Leave that "
                "to the Trainer, or train on one pipeline rank with automatic_optimization = False."
            )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def move_optimizers(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the optimizers' states, except those that some (Adagrad) make for placeholders when constructed."""
    for optimizer in optimizers:
        placeholders = {p: optimizer.state.pop(p) for p in list(optimizer.state) if p.is_meta}
        _optimizer_to_device(optimizer, device)
        optimizer.state.update(placeholders)


def unguard_states(optimizers: Sequence[Optimizer], shard: Callable[[Tensor, Tensor], Tensor] | None = None) -> None:
    """Make the states plain tensors that some (Adagrad) have made of guarded parameters when constructed.

    `shard` gives this rank's part of a state that was made of a whole parameter; None: none are parts.
    """
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            plain = {name: _plain(value) for name, value in state.items()}
            if shard is not None:
                plain = {n: shard(v, parameter) if isinstance(v, Tensor) else v for n, v in plain.items()}
            state.update(plain)


def _plain(value: Any) -> Any:
    if not isinstance(value, PartialValues | MissingValues):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)

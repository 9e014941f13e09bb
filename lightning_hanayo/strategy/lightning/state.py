"""Optimizers as Lightning wraps and moves them, where some parameters are placeholders."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partial_values import PartialValues
from lightning_hanayo.partition.missing_values import MissingValues


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer, without Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def searches_rate(trainer: "pl.Trainer") -> bool:
    """Whether `Tuner.lr_find` or `LearningRateFinder` trains now, at rates up to those at which losses are NaN."""
    return any(isinstance(callback, _LRCallback) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def options_now(trainer: "pl.Trainer") -> list[Any]:
    """The numbers among the optimizers' options, and how far their schedulers are: what a step might change."""
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
            "training_step changes options of an optimizer, such as its learning rate, or steps a scheduler. It runs "
            "on pipeline rank 0 alone, and once for each micro-batch. Do that in on_train_batch_start or "
            "on_train_batch_end, which run once on all ranks, or return the scheduler with {'interval': 'step'} from "
            "configure_optimizers."
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
                "training_step steps an optimizer of configure_optimizers, but it runs on pipeline rank 0 alone, and "
                "once for each micro-batch. Leave that to the Trainer, or train on one pipeline rank with "
                "automatic_optimization = False."
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

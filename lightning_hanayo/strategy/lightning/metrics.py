"""The shared metrics: what pipeline rank 0 has logged, known on every rank of its pipeline."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.runtime.comm.relay import Relay
from lightning_hanayo.strategy.lightning.internals import overrides
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


class SharedMetrics(_LoggerConnector):
    """Lightning's logger connector, whose finished metrics come down the chain to the ranks that saw no loss."""

    chain: Relay
    """all ranks that train one copy of the model"""
    computes: bool
    """whether this rank's steps have logged what rank 0's have: pipeline rank 0 of each cube rank"""
    warns: bool

    def share(self) -> None:
        """Give all ranks of the pipeline what rank 0 knows. Called by all of them."""
        kinds = ("_callback_metrics", "_logged_metrics")
        own = {kind: {k: _plain(v) for k, v in getattr(self, kind).items()} for kind in kinds}
        for kind, metrics in self.chain.share("metrics", own).items():
            if self.chain.transport.rank > 0:
                getattr(self, kind).update({k: _tensor(v, self.chain.transport.device) for k, v in metrics.items()})

    def share_step(self, loss: Tensor) -> Tensor:
        """Share what the step has logged; return its loss, rank 0's on every rank."""
        self.share_live()
        value = self.chain.share("loss", _plain(loss) if self.chain.transport.rank == 0 else None)
        return loss if self.chain.transport.rank == 0 else _tensor(value, self.chain.transport.device)

    def share_live(self) -> None:
        """Share what can be read at this moment, within a batch or at the end of an epoch."""
        if self.computes:
            _ = self.callback_metrics, self.logged_metrics  # reading them brings them up to date
        self.share()

    @property
    @override
    def metrics(self) -> Any:
        with warnings.catch_warnings():
            if not self.warns:  # one data rank: there is nothing to sync
                warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
            return super().metrics

    @override
    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        self.share_live()  # what the steps logged, for the callbacks' epoch ends

    @override
    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.share()

    @override
    def update_eval_epoch_metrics(self) -> Any:
        metrics = super().update_eval_epoch_metrics()
        self.share()
        return metrics if self.computes else dict(self._logged_metrics)

    @property
    @override
    def callback_metrics(self) -> Any:
        return super().callback_metrics if self.computes else self._callback_metrics

    @property
    @override
    def logged_metrics(self) -> Any:
        return super().logged_metrics if self.computes else self._logged_metrics


def on_train_epoch_end(module: "pl.LightningModule", own: Callable[[], object] | None) -> None:
    """The module's own hook, and then its metrics for all ranks: callbacks that monitor them look right after it.

    `own` is the hook if the user has set it on the instance.
    """
    if own is None:
        type(module).on_train_epoch_end(module)
    elif callable(own):  # Lightning passes over anything else
        own()
    connector = module.trainer._logger_connector
    if isinstance(connector, SharedMetrics):
        connector.share_live()


def share_metrics(
    trainer: "pl.Trainer", chain: Relay, changes: TemporaryAttributes, *, computes: bool, warns: bool
) -> None:
    """Make the trainer's metrics known on every rank of the pipeline, and of its cubes."""
    connector, module = trainer._logger_connector, trainer.lightning_module
    changes.set(connector, "__class__", SharedMetrics)
    for name, value in {"chain": chain, "computes": computes, "warns": warns}.items():
        changes.set(connector, name, value)
    hook = partial(on_train_epoch_end, module, vars(module).get("on_train_epoch_end"))
    changes.set(module, "on_train_epoch_end", hook)


def reads_step_metrics(trainer: "pl.Trainer", batch_idx: int, *, steps: bool) -> bool:
    """Whether a callback or a scheduler reads metrics at the end of this batch. The same on all ranks.

    Lightning's own callbacks read them when they save; of a user's it isn't known, so any that looks at the ends of
    batches counts.
    """
    plateaus = (c for c in trainer.strategy.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step")
    if steps and any((batch_idx + 1) % config.frequency == 0 for config in plateaus):
        return True
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # an attribute that only a connector declares
    module = trainer.lightning_module
    return overrides(module, "on_train_batch_end") or any(map(partial(_reads, trainer, steps), callbacks))


def _reads(trainer: "pl.Trainer", steps: bool, callback: "pl.Callback") -> bool:
    if isinstance(callback, ModelCheckpoint):
        every = callback._every_n_train_steps  # what it monitors, or puts into a file's name
        due = steps and every > 0 and (trainer.global_step + 1) % every == 0
        return due or callback._train_time_interval is not None
    own = type(callback).__module__.startswith(("lightning.", "lightning_hanayo."))
    if isinstance(callback, LambdaCallback):
        return "on_train_batch_end" in vars(callback)
    return not own and type(callback).on_train_batch_end is not pl.Callback.on_train_batch_end


def _plain(value: Any) -> list[Any]:
    return [value.tolist(), str(value.dtype).removeprefix("torch.")] if isinstance(value, Tensor) else [value, ""]


def _tensor(plain: list[Any], device: torch.device) -> Any:
    value, dtype = plain
    return torch.tensor(value, dtype=getattr(torch, dtype), device=device) if dtype else value


def connector_of(trainer: "pl.Trainer") -> SharedMetrics:
    """The trainer's connector, after `share_metrics`."""
    connector: Any = trainer._logger_connector
    assert isinstance(connector, SharedMetrics)
    return connector

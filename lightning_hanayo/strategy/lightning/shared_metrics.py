"""Makes the metrics that pipeline rank 0 has logged known on every rank of its pipeline."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.errors import NotAvailableError
from lightning_hanayo.runtime.comm.object_collectives import from_text, to_text
from lightning_hanayo.runtime.comm.relay import MessageKind, Relay
from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


class SharedMetrics(_LoggerConnector):
    """Lightning's logger connector, which relays finished metrics to the ranks that saw no loss.

    The Trainer's own connector takes this class for the time of a run: callbacks, loops and loggers hold references to
    that object, so another one in its place would not be asked.
    """

    relay: Relay
    """over all ranks that train one copy of the model"""
    computes: bool
    """whether this rank's steps have logged what rank 0's have: pipeline rank 0 of each cube rank"""
    warns: bool
    at_epoch_end: Callable[[], None]
    """called by all ranks, before and after the hooks"""

    def share(self, result: Any = None) -> Any:
        """Give all ranks of the pipeline rank 0's metrics; return its `result`. Called by all of them."""
        names = ("_callback_metrics", "_logged_metrics")
        own = {name: getattr(self, name) for name in names}
        received, result = self._broadcast("metrics", (own, result) if self._is_first else None)
        for name, metrics in received.items() if not self._is_first else ():
            getattr(self, name).update(metrics)
        return result

    def share_step(self, loss: Tensor) -> Tensor:
        """Share what the step has logged; return its loss, rank 0's on every rank."""
        self.share_current()
        shared: Tensor = self._broadcast("loss", loss if self._is_first else None)
        return shared

    @property
    def _is_first(self) -> bool:
        return self.relay.transport.rank == 0

    def _broadcast(self, kind: MessageKind, value: Any) -> Any:
        """The first rank's value, on each rank's own device: one copy to the host, for all tensors in it."""
        if self.relay.transport.num_ranks == 1:
            return value
        text = self.relay.broadcast(kind, to_text(value) if self._is_first else None)
        return value if self._is_first else from_text(text, self.relay.transport.device)

    def share_current(self) -> None:
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
        self.share_current()  # what the steps logged, for the callbacks' epoch ends
        self.at_epoch_end()

    @override
    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.share()
        self.at_epoch_end()  # what a hook on pipeline rank 0 alone has changed

    @override
    def update_eval_epoch_metrics(self) -> Any:
        metrics = super().update_eval_epoch_metrics()
        shared = self.share(metrics)  # of one loader: what others have logged is in `_logged_metrics`, too
        return metrics if self.computes else shared

    @property
    @override
    def callback_metrics(self) -> Any:
        return super().callback_metrics if self.computes else self._callback_metrics

    @property
    @override
    def logged_metrics(self) -> Any:
        return super().logged_metrics if self.computes else self._logged_metrics


def share_metrics(
    trainer: "pl.Trainer",
    relay: Relay,
    attributes: TemporaryAttributes,
    *,
    computes: bool,
    warns: bool,
    at_epoch_end: Callable[[], None],
) -> None:
    """Make the trainer's metrics known on every rank of the pipeline and of its cubes, for the time of a run."""
    connector, module = trainer._logger_connector, trainer.lightning_module
    attributes.set(connector, "__class__", SharedMetrics)
    for name, value in {"relay": relay, "computes": computes, "warns": warns, "at_epoch_end": at_epoch_end}.items():
        attributes.set(connector, name, value)
    hook = partial(_on_train_epoch_end, module, vars(module).get("on_train_epoch_end"))
    attributes.set(module, "on_train_epoch_end", hook)


def shared_metrics_of(trainer: "pl.Trainer") -> SharedMetrics:
    """The trainer's connector, after `share_metrics`.

    Raises:
        NotAvailableError: `share_metrics` was not called in this run.
    """
    connector: Any = trainer._logger_connector
    if not isinstance(connector, SharedMetrics):
        raise NotAvailableError("metrics are shared between ranks only while the Trainer runs")
    return connector


def _on_train_epoch_end(module: "pl.LightningModule", instance_hook: Callable[[], object] | None) -> None:
    """The module's own hook, and then its metrics for all ranks: callbacks that monitor them look right after it.

    `instance_hook` is what the user has set on the instance in place of the method.
    """
    if instance_hook is None:
        type(module).on_train_epoch_end(module)
    elif callable(instance_hook):  # Lightning ignores anything else
        instance_hook()
    connector = module.trainer._logger_connector
    if isinstance(connector, SharedMetrics):
        connector.share_current()

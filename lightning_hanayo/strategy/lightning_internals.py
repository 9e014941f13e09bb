"""Lightning's internals: the one place that touches what Lightning keeps private (2.6.6).

Whatever a new Lightning release breaks is mended here.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_hanayo.runtime.chain import Chain
from lightning_hanayo.runtime.user_step import without_values


def keep_sigterm_local(trainer: "pl.Trainer") -> None:
    """No collective for SIGTERM, neither before each batch nor in the signal's handler.

    The first drains the pipe with a host sync per batch (Lightning issue #21487); the second hangs all ranks that the
    signal meets in different places (#20806). A rank that got the signal leaves after its batch, the others follow it.
    """

    def note(signum: int, _: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not trainer.received_sigterm:
            launcher.kill(signum)
        trainer._signal_connector.received_sigterm = True

    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    trainer._signal_connector._sigterm_notifier_fn = note  # type: ignore[method-assign]


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


def expected_gradient(trainer: "pl.Trainer") -> float:
    """What Lightning's backward will send into the loss that `training_step` returns."""
    return 1.0 / trainer.accumulate_grad_batches


def continues_accumulation(trainer: "pl.Trainer", batch_idx: int) -> bool:
    """Whether Lightning won't zero gradients for this batch."""
    return batch_idx % trainer.accumulate_grad_batches != 0


def skip_transfer_hooks(module: "pl.LightningModule") -> None:
    """On a rank that gets no data: the user's batch transfer hooks have nothing to work on."""
    module._on_before_batch_transfer = _as_it_is  # type: ignore[method-assign]
    module._apply_batch_transfer_handler = _as_it_is  # type: ignore[method-assign]


def _as_it_is(batch: Any, *_: Any, **__: Any) -> Any:
    """A function of the module, so that the user's module can be pickled."""
    return batch


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


def set_metric_groups(module: nn.Module, group: Any) -> None:
    """Let torchmetrics sync over the data ranks of this pipeline rank alone."""
    for part in module.modules():
        if isinstance(part, Metric) and isinstance(part.dist_sync_fn, GatherOver | None):
            part.dist_sync_fn = GatherOver(group) if group is not None else None


class MicrobatchLog:
    """What a step logs, merged over its micro-batches and given to Lightning once, as from one step.

    `self.log` calls are kept back while the micro-batches run: mean values are averaged with the micro-batches' shares,
    sums added, and so on. So step values, epoch means and `sync_dist` are those of an undivided batch.
    """

    def __init__(self, trainer: "pl.Trainer", microbatches: Sequence[Any], shares: Sequence[float]) -> None:
        self._results: Any = trainer._results
        self._microbatches = microbatches
        self._shares = shares
        self._current = 0
        self._kept: dict[str, dict[int, tuple[Any, int, Any]]] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While open, log calls are kept; at its end they are merged and passed on."""
        results = self._results
        if results is None:  # predict logs nothing
            yield
            return
        batch, give = results.batch, results.update_metrics
        results.update_metrics = self._keep
        try:
            yield
        finally:
            del results.update_metrics
            results.batch, results.batch_size = batch, None
        for key, calls in self._kept.items():
            self._pass_on(key, calls, give)

    def enter(self, microbatch: int) -> None:
        """The user code of that micro-batch runs next."""
        self._current = microbatch
        if self._results is not None:
            self._results.batch = self._microbatches[microbatch]
            self._results.batch_size = None

    def _keep(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, Tensor) and value.is_meta:
            del self._results[key]  # made for this call, on `meta`: Lightning could never move it again
            raise without_values(f"self.log({key.partition('.')[2]!r})")
        self._results[key].has_reset = False
        cache = value._forward_cache if isinstance(value, Metric) else None
        self._kept.setdefault(key, {})[self._current] = (value, batch_size, cache)

    def _pass_on(self, key: str, calls: dict[int, tuple[Any, int, Any]], give: Callable[..., None]) -> None:
        metric = self._results[key]
        batch_size = sum(size for _, size, _ in calls.values())
        if metric.is_tensor:
            values = {m: value for m, (value, _, _) in calls.items()}
            give(key, self._merged(values, metric.meta), batch_size)
            return
        value = next(iter(calls.values()))[0]
        give(key, value, batch_size)
        caches = {m: cache for m, (_, _, cache) in calls.items() if isinstance(cache, Tensor)}
        if caches:
            metric._forward_cache = self._mean(caches)

    def _merged(self, values: dict[int, Tensor], meta: Any) -> Tensor:
        if meta.is_mean_reduction:
            return self._mean(values)
        stacked = torch.stack(list(values.values()))
        return meta.reduce_fx(stacked)  # type: ignore[no-any-return]

    def _mean(self, values: dict[int, Tensor]) -> Tensor:
        """Weighted with the shares; a micro-batch without any counts for nothing, even if its mean is NaN."""
        share = {m: self._shares[m] for m in values}
        total = sum(share.values())
        if not total:
            return next(iter(values.values()))
        parts = [values[m] * (share[m] / total) for m in values if share[m]]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


class SharedMetrics(_LoggerConnector):
    """Lightning's logger connector, whose finished metrics come down the chain to the ranks that saw no loss."""

    chain: Chain
    warns: bool

    def share(self) -> None:
        """Give all ranks of the pipeline what rank 0 knows. Called by all of them."""
        kinds = ("_callback_metrics", "_logged_metrics")
        own = {kind: {k: _plain(v) for k, v in getattr(self, kind).items()} for kind in kinds}
        for kind, metrics in self.chain.share(own).items():
            if self.chain.transport.rank > 0:
                getattr(self, kind).update({k: _tensor(v, self.chain.transport.device) for k, v in metrics.items()})

    def share_live(self) -> None:
        """Share what can be read at this moment, within a batch or at the end of an epoch."""
        if self.chain.transport.rank == 0:
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
        return metrics if self.chain.transport.rank == 0 else dict(self._logged_metrics)

    @property
    @override
    def callback_metrics(self) -> Any:
        return super().callback_metrics if self.chain.transport.rank == 0 else self._callback_metrics

    @property
    @override
    def logged_metrics(self) -> Any:
        return super().logged_metrics if self.chain.transport.rank == 0 else self._logged_metrics


def on_train_epoch_end(module: "pl.LightningModule") -> None:
    """The module's own hook, and then its metrics for all ranks: callbacks that monitor them look right after it."""
    type(module).on_train_epoch_end(module)
    connector = module.trainer._logger_connector
    if isinstance(connector, SharedMetrics):
        connector.share_live()


def share_metrics(trainer: "pl.Trainer", chain: Chain, *, warns: bool) -> SharedMetrics:
    """Make the trainer's metrics known on every rank of the pipeline."""
    connector: Any = trainer._logger_connector
    connector.__class__ = SharedMetrics
    connector.chain, connector.warns = chain, warns
    module = trainer.lightning_module
    module.on_train_epoch_end = MethodType(on_train_epoch_end, module)  # type: ignore[method-assign]
    return connector  # type: ignore[no-any-return]


def optimizers_to_device(optimizers: Sequence[Optimizer], device: torch.device) -> None:
    """Move the optimizers' states, but for those that some (Adagrad) make for placeholders when constructed."""
    for optimizer in optimizers:
        placeholders = {p: optimizer.state.pop(p) for p in list(optimizer.state) if p.is_meta}
        _optimizer_to_device(optimizer, device)
        optimizer.state.update(placeholders)


def restore(trainer: "pl.Trainer") -> None:
    """Give trainer and module their own methods back, when the ranks part."""
    if isinstance(trainer._logger_connector, SharedMetrics):
        trainer._logger_connector.__class__ = _LoggerConnector  # type: ignore[assignment]
    for hook in ("on_train_epoch_end", "_on_before_batch_transfer", "_apply_batch_transfer_handler"):
        vars(trainer.lightning_module).pop(hook, None)
    set_metric_groups(trainer.lightning_module, None)


def reads_step_metrics(trainer: "pl.Trainer", batch_idx: int, *, steps: bool) -> bool:
    """Whether a callback or a scheduler reads metrics at the end of this batch. The same on all ranks.

    Lightning's own callbacks read them when they monitor; of a user's it isn't known, so any that looks at the ends of
    batches counts.
    """
    plateaus = (c for c in trainer.strategy.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "step")
    if steps and any((batch_idx + 1) % config.frequency == 0 for config in plateaus):
        return True
    callbacks: list[pl.Callback] = vars(trainer)["callbacks"]  # an attribute that only a connector declares
    module = trainer.lightning_module
    return is_overridden("on_train_batch_end", module) or any(map(partial(_reads, trainer, steps), callbacks))


def _reads(trainer: "pl.Trainer", steps: bool, callback: "pl.Callback") -> bool:
    if isinstance(callback, ModelCheckpoint):
        every = callback._every_n_train_steps
        due = steps and every > 0 and (trainer.global_step + 1) % every == 0
        return callback.monitor is not None and (due or callback._train_time_interval is not None)
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

"""Logged values and metrics: merged over micro-batches, sent to the ranks that have none, synced by torchmetrics.

block on rank 1    self.log("aux", 0.1)     `BlockLogs` carries the call to pipeline rank 0, where the step runs
step on rank 0     self.log("loss", 0.4)    `MicrobatchLog` keeps both back, and logs them once for the whole batch
all ranks          callback_metrics         `SharedMetrics` sends them from rank 0
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_mean
from torchmetrics.utilities.distributed import gather_all_tensors
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.merge import HostNumbers
from lightning_hanayo.pipeline_parallel.capture.carriers import BlockRun, Carrier
from lightning_hanayo.pipeline_parallel.capture.user_step import missing_values_error
from lightning_hanayo.pipeline_parallel.object_collectives import from_text, to_text
from lightning_hanayo.strategy.batch_split import BatchSplitter, SplitBatch
from lightning_hanayo.strategy.lightning.state import current_results
from lightning_hanayo.strategy.losses import PieceWeights
from lightning_hanayo.strategy.patches import TemporaryAttributes
from lightning_hanayo.strategy.run import Run


class SharedMetrics(_LoggerConnector):
    """Lightning's logger connector, which relays finished metrics to the ranks that saw no loss.

    The Trainer's own connector takes this class for the time of a run: callbacks, loops and loggers hold references to
    that object, so another one in its place would not be asked.
    """

    run: Run
    at_epoch_end: Callable[[], None]
    """called by all ranks, before and after the hooks"""

    @property
    def computes(self) -> bool:
        """Whether this rank's steps have logged the same as rank 0's. The ranks of a cube log alike."""
        return self.run.pipe_rank == 0

    def share(self, result: Any = None) -> Any:
        """Give all ranks of the pipeline rank 0's metrics; return its `result`. Called by all of them."""
        names = ("_callback_metrics", "_logged_metrics")
        own = {name: getattr(self, name) for name in names}
        relay = self.run.replica_relay
        if relay.transport.num_ranks == 1:
            return result
        if relay.transport.rank == 0:  # one copy to the host, for all tensors
            relay.broadcast("metrics", to_text((own, result)))
            return result
        received, result = from_text(relay.broadcast("metrics"), relay.transport.device)
        for name, metrics in received.items():
            getattr(self, name).update(metrics)
        return result

    def share_current(self, result: Any = None) -> Any:
        """Share the metrics of this moment, within a batch or at the end of an epoch, and this `result`."""
        if self.computes:
            _ = self.callback_metrics, self.logged_metrics  # reading them brings them up to date
        return self.share(result)

    @property
    @override
    def metrics(self) -> Any:
        if self.run.topology.data > 1 or self._first_loop_iter is not None:
            return super().metrics
        with warnings.catch_warnings():  # at an epoch's end Lightning advises to sync, but here is nothing to sync
            warnings.filterwarnings("ignore", message="It is recommended to use `self.log")
            return super().metrics

    @override
    def epoch_end_reached(self) -> None:
        super().epoch_end_reached()
        self.share_current()  # the steps' metrics, for the callbacks' epoch ends
        self.at_epoch_end()

    @override
    def on_epoch_end(self) -> None:
        super().on_epoch_end()
        self.share()
        self.at_epoch_end()  # changes of a hook on pipeline rank 0 alone

    @override
    def update_eval_epoch_metrics(self) -> Any:
        metrics = super().update_eval_epoch_metrics()
        shared = self.share(metrics)  # of one loader; those of others are in `_logged_metrics`, too
        return metrics if self.computes else shared

    @property
    @override
    def callback_metrics(self) -> Any:
        return super().callback_metrics if self.computes else self._callback_metrics

    @property
    @override
    def logged_metrics(self) -> Any:
        return super().logged_metrics if self.computes else self._logged_metrics


def share_metrics(run: Run, at_epoch_end: Callable[[], None]) -> None:
    """Make the trainer's metrics known on every rank of the pipeline and of its cubes, for the time of a run."""
    connector = run.trainer._logger_connector
    for name, value in {"__class__": SharedMetrics, "run": run, "at_epoch_end": at_epoch_end}.items():
        run.attributes.set(connector, name, value)

    def then_share(hook: Any) -> None:
        """The module's own hook, and then its metrics for all ranks: callbacks that monitor them look right after."""
        if callable(hook):  # Lightning ignores anything else
            hook()
        shared_metrics_of(run.trainer).share_current()

    run.attributes.wrap(run.module, "on_train_epoch_end", then_share)


def shared_metrics_of(trainer: "pl.Trainer") -> SharedMetrics:
    """The trainer's connector, after `share_metrics`."""
    connector: Any = trainer._logger_connector
    assert isinstance(connector, SharedMetrics)
    return connector


class LogCall(NamedTuple):
    """One call of `self.log` on a piece."""

    value: Any
    """None for a torchmetric, which stays on its rank"""
    batch_size: int
    is_of_batch: bool
    """whether Lightning has read the batch size from the whole batch, as the user gave none"""
    cache: Any
    """the value of a torchmetric on this micro-batch"""


class GivenBatchSizes:
    """Finds out whether the `batch_size` that a step gives to `self.log` is a constant. Lives for one run.

    given for micro-batches of      4 samples    1 sample     a batch of 4 + 4 counts, one of 1
    batch_size=len(x)                   4            1              8, 1        the sum, as in one process
    batch_size=8, a constant            8            8             16, 16       in proportion as 8, 8 in one process
    """

    def __init__(self) -> None:
        self._num_pieces: dict[Any, int] = {}
        """of the first batch"""
        self._seen: dict[Any, tuple[set[int], set[int]]] = {}
        """sizes of pieces, and the batch sizes given for them"""
        self._has_warned = False

    def total(self, key: str, call: int, sizes: Sequence[int], given: Sequence[int]) -> int:
        """The weight of a batch in the mean of `key`'s values.

        Args:
            key: of the results, with the name that the step logs.
            call: the first, second ... one with this key in the step.
            sizes: the samples of each piece that has logged.
            given: the batch size that each of them gave.
        """
        first = self._num_pieces.setdefault((key, call), len(given))
        of_pieces, numbers = self._seen.setdefault((key, call), (set(), set()))
        if len(numbers) < 2:
            of_pieces.update(sizes)
            numbers.update(given)
        is_same = len(numbers) == 1
        if is_same and len(of_pieces) > 1:
            return first * given[0]
        if is_same and len(given) != first and numbers != of_pieces and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"self.log({key.partition('.')[2]!r}, batch_size={given[0]}) gives one number for {len(given)} "
                f"micro-batches and for {first}: it is taken for the size of a micro-batch. If it is a constant, "
                "leave batch_size out, and Lightning reads the size of the batch.",
                stacklevel=2,
            )
        return sum(given)


@dataclass(eq=False, repr=False)
class MicrobatchLog:
    """Merges the `self.log` calls of one batch's micro-batches.

    Means are averaged with the micro-batches' weights in the loss, sums are added, and so on. So step values, epoch
    means and `sync_dist` come out as for one batch, for values that are means (or sums, ...) over samples.
    """

    trainer: "pl.Trainer"
    """whose results take the merged values"""
    split: SplitBatch
    """the batch in pieces, some of which this rank runs"""
    weights: PieceWeights
    """of each piece"""
    splitter: BatchSplitter
    """gathers from the ranks that run the other pieces"""
    given: GivenBatchSizes
    """the batch sizes that steps gave for earlier batches of the run"""

    def __post_init__(self) -> None:
        self._results: Any = self.trainer._results
        self._saved_states: list[tuple[Metric, Any]] = []
        self._piece: int | None = 0
        self._calls: dict[str, dict[int, list[LogCall]]] = {}
        self._metrics: dict[str, Metric] = {}
        self._added: set[str] = set()

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Keep log calls back while open; at the end merge and log them, unless the batch has failed."""
        results = self._results
        if results is None:  # predict logs nothing
            yield
            self._restore_metrics()
            return
        log = results.update_metrics
        results.update_metrics = self._keep
        try:
            yield
        finally:
            del results.update_metrics
            results.batch_size = None
            self._restore_metrics()
        for key, calls in self._gathered().items():
            for i in range(max(map(len, calls.values()))):  # a key may be logged several times in one step
                self._log_merged(key, i, {piece: own[i] for piece, own in calls.items() if i < len(own)}, log)

    def add_up(self, losses: Sequence[Tensor], number: HostNumbers) -> None:
        """Log the sum of this rank's `losses`, one per micro-batch, where the step has logged them: they are sums."""
        own = dict(zip(self.split.own, losses, strict=True))
        values = {
            key: {piece: [one.value for one in of] for piece, of in calls.items()} for key, calls in self._calls.items()
        }
        number.add(values)
        for key, of_pieces in values.items():
            single = all(len(of) == 1 and isinstance(of[0], Tensor) and of[0].numel() == 1 for of in of_pieces.values())
            if single and all(number(of[0]) == number(own[piece]) for piece, of in of_pieces.items()):
                self._added.add(key)

    def enter(self, microbatch: int | None) -> None:
        """Called before the user code of that micro-batch runs; None: values that the code logs don't count."""
        self._restore_metrics()
        piece = None if microbatch is None else self.split.own[microbatch]
        self._piece = piece if piece is not None and self.split.pieces[piece] is not None else None
        if self._piece is None or not self.split.counts:
            metrics = (part for part in self.trainer.lightning_module.modules() if isinstance(part, Metric))
            self._saved_states = [(metric, copy_state(metric)) for metric in metrics]

    @property
    def names(self) -> set[str]:
        """Under which this rank has logged values in this batch."""
        return set(self._calls)

    def means_of(self, piece: int) -> list[Tensor]:
        """The values that this rank has logged as means for a piece, once the batch has ended."""
        means = (own for key, own in self._calls.items() if self._results[key].meta.is_mean_reduction)
        return [call.value for own in means for call in own.get(piece, ()) if isinstance(call.value, Tensor)]

    def _restore_metrics(self) -> None:
        """Undo updates of metrics by code on a padding sample, or that another rank runs alike."""
        for metric, state in self._saved_states:
            restore_state(metric, state, counts_elsewhere=not self.split.counts)
        self._saved_states = []

    def _keep(self, key: str, value: Any, batch_size: int) -> None:
        if isinstance(value, Tensor) and value.is_meta:
            del self._results[key]  # created for this call, on `meta`: Lightning could never move it again
            raise missing_values_error(f"self.log({key.partition('.')[2]!r})")
        self._results[key].has_reset = False
        if isinstance(value, Metric):
            self._metrics[key] = value
        calls = self._calls.setdefault(key, {})
        if self._piece is not None:
            value, cache = (None, value._forward_cache) if isinstance(value, Metric) else (value, None)
            call = LogCall(value, batch_size, self._results.batch_size is not None, cache)
            calls.setdefault(self._piece, []).append(call)
        self._results.batch_size = None  # so that it is set again if the next call reads it

    def _gathered(self) -> dict[str, dict[int, list[LogCall]]]:
        """The calls of all ranks, by key and piece. Metric objects stay on their ranks."""
        ranks = self.splitter.all_gather(self._calls)
        return {key: dict(sorted(item for rank in ranks for item in rank.get(key, {}).items())) for key in self._calls}

    def _log_merged(self, key: str, number: int, calls: dict[int, LogCall], log: Callable[..., None]) -> None:
        """Log the calls with this key, of which a step may make several: the first ones, the second ones ..."""
        metric = self._results[key]
        own_sizes = {piece: call.batch_size for piece, call in calls.items() if not call.is_of_batch}
        batch_size = next(iter(calls.values())).batch_size
        if own_sizes and metric.is_tensor and metric.meta.on_epoch and metric.meta.is_mean_reduction:
            sizes = [self.split.sizes.parts[0][piece] for piece in own_sizes]
            batch_size = self.given.total(key, number, sizes, list(own_sizes.values()))
        if metric.is_tensor:
            values = {piece: call.value for piece, call in calls.items()}
            is_sum = key in self._added and metric.meta.is_mean_reduction
            if is_sum:
                merged: Any = sum(values.values())
            elif metric.meta.is_mean_reduction:
                own = self.weights.logged.get(key.rpartition(".")[2])
                merged = _mean(values, self.weights.in_mean) if own is None else _added_up(values, own)
            else:
                merged = metric.meta.reduce_fx(torch.stack(list(values.values())))
            log(key, merged, batch_size)
            return
        log(key, self._metrics[key], batch_size)
        caches = {piece: call.cache for piece, call in calls.items() if isinstance(call.cache, Tensor)}
        if caches:
            metric._forward_cache = _mean(caches, self.weights.in_mean)


def _mean(values: dict[int, Tensor], weights: Sequence[float]) -> Tensor:
    """Weighted mean. A piece of weight 0 doesn't count, even if its value is NaN."""
    total = sum(weights[piece] for piece in values)
    if len(values) == 1 or not total:
        return next(iter(values.values()))
    return _added_up(values, [weight / total for weight in weights])


def _added_up(values: dict[int, Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([value * weights[piece] for piece, value in values.items() if weights[piece]]).sum(0)


Call = list[Any]
"""hook, name, value, and the options of `self.log` as a dictionary"""
_NOT_SENT = ("sync_dist_fn", "sync_dist_group")


class BlockLogs(Carrier):
    """Carries log calls, on one rank; in some cubes it `rejects` them, as blocks compute with parts of values there."""

    def __init__(self, module: Any, *, rejects: bool = False) -> None:
        self._module = module
        self._rejects = rejects

    def begin_blocks(self, tree: list[Call] | None, run: BlockRun) -> tuple[Any, list[Call]]:
        """Keep what the blocks log, in the list that is returned with the Trainer's results."""
        calls: list[Call] = []
        results = current_results(self._module.trainer)
        if results is not None:  # predict logs nothing
            results.log = lambda hook, name, value, **options: calls.append(self._call(hook, name, value, options))
        return results, calls

    def abandon_blocks(self, begun: tuple[Any, list[Call]]) -> None:
        """Keep no more."""
        if begun[0] is not None:
            del begun[0].log

    def end_blocks(self, tree: list[Call] | None, run: BlockRun, begun: tuple[Any, list[Call]]) -> list[Call] | None:
        """Add what they have logged."""
        self.abandon_blocks(begun)
        return [*(tree or []), *begun[1]] if begun[1] else tree

    def deliver(self, tree: list[Call] | None, left: Any) -> None:
        """Log what blocks elsewhere have logged."""
        if tree:
            reduce = self._module.trainer.strategy.reduce
            results: Any = self._module.trainer._results
            for hook, name, value, options in tree:
                results.log(hook, name, value, sync_dist_fn=reduce, sync_dist_group=None, **options)

    def _call(self, hook: str, name: str, value: Any, options: dict[str, Any]) -> Call:
        """The call, as far as it can be sent.

        Raises:
            UnsupportedError: it logs a metric object, or has a function as `reduce_fx`; or this is a cube.
        """
        way_out = f"Store the value in the block (self.value = {name}), and log it in the step."
        if self._rejects:
            raise UnsupportedError(
                f"a block calls self.log({name!r}), but in this cube blocks work on other parts of the samples or "
                f"features than the step. Log it in the step."
            )
        if not isinstance(value, Tensor) or not isinstance(options.get("reduce_fx"), str):
            raise UnsupportedError(
                f"a block calls self.log({name!r}) with a {type(value).__name__} and "
                f"reduce_fx={options.get('reduce_fx')!r}: only numbers can be sent, with a reduction's name. {way_out}"
            )
        return [hook, name, value.detach(), {key: own for key, own in options.items() if key not in _NOT_SENT}]


class GatherOver:
    """torchmetrics' gather function over `group`. Copies of a metric share it; pickled ones lose the group."""

    def __init__(self, group: Any = None) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any = None) -> list[Tensor]:
        """One tensor per rank of the group."""
        return gather_all_tensors(result, self._group)

    def __deepcopy__(self, _: Any) -> "GatherOver":
        return self

    def __reduce__(self) -> Any:
        return GatherOver, ()


def sync_metrics_over(module: nn.Module, group: Any, attributes: TemporaryAttributes) -> None:
    """Let torchmetrics sync over the ranks of `group` only."""
    for part in module.modules():
        if isinstance(part, Metric) and isinstance(part.dist_sync_fn, GatherOver | None):
            part.dist_sync_fn = None  # a copy that was made during another run still holds that run's
            attributes.set(part, "dist_sync_fn", GatherOver(group))


def copy_state(metric: Metric) -> Any:
    """The state of a metric."""
    return metric._copy_state_dict(), (metric._update_count, metric._computed, metric._forward_cache)


def restore_state(metric: Metric, state: Any, *, counts_elsewhere: bool = False) -> None:
    """Set a metric back to the state of `copy_state`.

    `counts_elsewhere`: another rank has made the same updates. What is a mean over ranks stays as it is there.
    """
    values, calls = state
    if not counts_elsewhere:
        metric._update_count, metric._computed, metric._forward_cache = calls
    for name, value in values.items():
        if not counts_elsewhere or metric._reductions[name] is not dim_zero_mean:
            setattr(metric, name, value)


@dataclass
class RecordedLogs:
    """What a dry run has logged."""

    logged: dict[tuple[str, int], tuple[Any, Mapping[str, Any]]] = field(default_factory=dict)
    """values and options, by name, and how often the name was logged before"""
    calls_logger: bool = False
    """whether it has called `log_metrics` of a logger"""


@contextmanager
def recorded_logs(trainer: "pl.Trainer") -> Iterator[RecordedLogs]:
    """Record what is logged inside it, instead of logging it."""
    recorded = RecordedLogs()

    def log(hook: str, name: str, value: Any, **options: Any) -> None:
        number = sum(key == name for key, _ in recorded.logged)
        recorded.logged[name, number] = value, options

    def log_metrics(*_: Any, **__: Any) -> None:
        recorded.calls_logger = True

    with TemporaryAttributes() as attributes:
        if trainer._results is not None:
            attributes.set(trainer._results, "log", log)
        for logger in trainer.loggers:
            attributes.set(logger, "log_metrics", log_metrics)
        yield recorded

"""`WaveReport`: how the pipeline really ran, as figures for loggers, tables, files and pictures.

at the start       `run_facts`          layout, sizes, samples, seed
single batches     `BatchFigures`       bubble and times of stages
                   `Throughput`         samples, tokens and FLOPs per second (`step_flops`), by the host's clock
at the end         `MeasuredBatches`    the last batches, as they ran: pictures, a trace, a profile of costs
"""

import os
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.errors import HanayoError, counted
from lightning_hanayo.pipeline_parallel.object_collectives import gather_objects
from lightning_hanayo.pipeline_parallel.profiling.trace import (
    BatchTrace,
    RecordedBatch,
    costs_of,
    exposed_communication,
    gather_trace,
    median_batch,
    num_microbatches,
    on_one_clock,
    stage_times,
    timeline_of,
    waits_of,
)
from lightning_hanayo.planner.files import Profile
from lightning_hanayo.plotting import save_comparison, save_timeline, save_trace
from lightning_hanayo.schedule import CostModel, Kind, Schedule, Timeline, simulate
from lightning_hanayo.strategy.checkpointing import CheckpointingStrategy
from lightning_hanayo.strategy.lightning.state import (
    logged_step,
    peak_flops,
    samples_per_rank,
    step_flops,
    whole_on_meta,
)
from lightning_hanayo.strategy.pipeline import Pipeline

_NAMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "backward_input", Kind.W: "backward_weight"}


class BatchFigures:
    """Gathers a batch's traces on pipeline rank 0.

    batch 50 ends       `start`  notes the batch: a device may still be running it
    batch 51 ends       `read`   its times are known; pipeline rank 0 receives those of the other ranks

    All ranks of the pipeline call `start` after the same batches, and `read` after each batch, before `start`.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._noted: tuple[int, RecordedBatch] | None = None

    def start(self, step: int) -> None:
        """Choose the last batch. `step`: its number for loggers."""
        if recorded := self._pipeline.engine.trace.recorded:
            self._noted = step, recorded[-1]

    def read(self) -> tuple[int, dict[str, float]] | None:
        """On rank 0, once for each batch that `start` was called for: its step and its figures."""
        if self._noted is None:
            return None
        (step, recorded), self._noted = self._noted, None
        table = self._pipeline.layout.table
        batch = gather_trace(self._pipeline.relay.transport, table, recorded.events)
        return None if batch is None else (step, figures(table(num_microbatches(batch[0])), batch))


def figures(schedule: Schedule, batch: BatchTrace) -> dict[str, float]:
    """Shares of all ranks' time, and each stage's mean times in milliseconds, under the names that loggers get."""
    batch = on_one_clock(schedule, batch)
    times = sorted(stage_times([batch]).items())
    return {
        "hanayo/bubble": timeline_of(schedule, batch).bubble_ratio,
        "hanayo/exposed_communication": exposed_communication(schedule, batch),
        **{f"hanayo/stage_{stage}/{_NAMES[kind]}_ms": 1e3 * seconds for (stage, kind), seconds in times},
    }


_TRACED = 4
"""how many batches a trace shows, one after another"""


@dataclass(frozen=True)
class MeasuredBatches:
    """Batches of one size, in the order in which they ran, and their schedule."""

    schedule: Schedule
    batches: tuple[BatchTrace, ...]

    @staticmethod
    def of(pipeline: Pipeline) -> "MeasuredBatches | None":
        """The recorded batches of full size, on rank 0 of a pipeline; None elsewhere. Called by all its ranks."""
        layout, transport = pipeline.layout, pipeline.relay.transport
        gathered = [gather_trace(transport, layout.table, events) for events in pipeline.engine.trace.batches]
        batches = [one for one in gathered if one is not None]
        if not batches:
            return None
        whole = [one for one in batches if num_microbatches(one[0]) == layout.num_microbatches] or batches[-1:]
        schedule = layout.table(num_microbatches(whole[0][0]))
        return MeasuredBatches(schedule, tuple(on_one_clock(schedule, batch) for batch in whole))

    @cached_property
    def timeline(self) -> Timeline:
        """The batch whose duration is the median one, in seconds."""
        return timeline_of(self.schedule, median_batch(self.batches))

    @cached_property
    def costs(self) -> CostModel:
        """Times of stages and messages, in seconds."""
        return costs_of(self.schedule, self.batches)

    @cached_property
    def predicted(self) -> Timeline:
        """The same batch, simulated with `costs`."""
        return simulate(self.schedule, self.costs)

    def save_trace(self, path: Path) -> None:
        """Write a trace for ui.perfetto.dev: the last batches with their waits, and one simulated batch."""
        last = self.batches[-_TRACED:]
        timelines = {"measured": timeline_of(self.schedule, *last), "predicted": self.predicted}
        save_trace(path, timelines, seconds=1.0, waits={"measured": waits_of(*last)})

    def profile(self, pipeline: Pipeline) -> Profile:
        """A profile that the next run can plan with. A loss stage's time is added to the stage before it."""
        layout = pipeline.layout
        blocks = tuple(len(run) for run in pipeline.ownership.stages)[: layout.num_stages]
        costs = self.costs
        if self.schedule.loss_stage:
            times = {name: getattr(costs, name) for name in ("forward", "backward_input", "backward_weight")}
            folded: dict[str, Any] = {name: (*of[:-2], of[-2] + of[-1]) for name, of in times.items()}
            costs = replace(costs, **folded)
        return Profile(layout.schedule, layout.num_ranks, layout.num_waves, layout.num_microbatches, blocks, costs)


def run_facts(trainer: "pl.Trainer", module: "pl.LightningModule", strategy: CheckpointingStrategy) -> dict[str, Any]:
    """The facts known when a training starts, by the names under which they are logged. For rank 0."""
    layout, topology, ownership = strategy.pipeline.layout, strategy.topology, strategy.pipeline.ownership
    cube = f" x {'x'.join(map(str, topology.cube))} cube" if topology.cube != (1, 1, 1) else ""
    stages = [f"{run.start}-{run.stop - 1}" if len(run) > 1 else str(run.start) for run in ownership.stages if run]
    parameters = list(whole_on_meta(module).parameters())
    facts = {
        "layout": f"{topology.pipe} pipeline{cube} x {topology.data} data = {counted(topology.world_size, 'rank')}",
        "schedule_name": layout.schedule,
        "num_waves": layout.num_waves,
        "num_microbatches": layout.num_microbatches,
        "stack": f"{ownership.stack.name}: {counted(len(ownership.stack), 'block')}, stages {' | '.join(stages)}",
        "predicted_bubble": round(layout.predict(), 4),
        "parameters": sum(one.numel() for one in parameters),
        "trained_parameters": sum(one.numel() for one in parameters if one.requires_grad),
        "weights_and_gradients_bytes": strategy.session.held_bytes,
    }
    of_rank, seed = samples_per_rank(trainer), os.environ.get("PL_GLOBAL_SEED")
    if of_rank is not None:
        facts["samples_per_step"] = of_rank * topology.data
    if seed is not None:
        facts["seed"] = int(seed)
    return {f"hanayo/{name}": value for name, value in facts.items()}


def peak_memory(strategy: CheckpointingStrategy) -> dict[int, int]:
    """The most bytes that each rank of the first replica has had so far, by rank.

    On an accelerator the memory that torch has allocated; on CPUs the memory of the process. Called by all ranks of the
    replica; rank 0 gets the values.
    """
    device = strategy.root_device
    if device.type == "cpu":
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
    else:
        own = torch.get_device_module(device).max_memory_allocated(device)
    if strategy.topology.replica_size == 1:
        return {0: own}
    peaks = gather_objects(strategy.groups.replica, own)
    return dict(zip(strategy.groups.replica_ranks, peaks, strict=False))


@dataclass(eq=False, repr=False)
class Throughput:
    """Counts samples, tokens and FLOPs of one data rank between two readings, for all of them, without evaluations."""

    count: Callable[[Any], int]
    """returns the samples of a batch"""
    num_data_ranks: int
    """how many see as many samples as this one"""
    flops: Callable[[Any], float] = lambda _: 0.0
    """returns the FLOPs of a batch; 0 where they aren't known"""
    totals: dict[str, int] = field(default_factory=lambda: {"samples": 0, "tokens": 0})
    """samples and tokens of all data ranks before; counted on"""
    _begun: float | None = field(default=None, init=False)
    _paused: float | None = field(default=None, init=False)
    _since: Counter[str] = field(default_factory=Counter, init=False)
    _flops: float = field(default=0.0, init=False)

    def note(self, batch: Any) -> None:
        """A batch has been trained. The first one, in which much is set up, only begins the measurement of time."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        found = {"samples": self.count(batch), "tokens": ids.numel() if isinstance(ids, Tensor) else 0}
        for name, number in found.items():
            self.totals[name] += self.num_data_ranks * number
        if self._begun is None:
            self._begun = time.perf_counter()
        else:
            self._since.update(found)
            self._flops += self.flops(batch)

    def pause(self) -> None:
        """Something else than training begins."""
        self._paused = time.perf_counter()

    def resume(self) -> None:
        """It has ended."""
        if self._paused is not None and self._begun is not None:
            self._begun += time.perf_counter() - self._paused
        self._paused = None

    def read(self) -> dict[str, float]:
        """The figures since the last reading and the totals, of all data ranks; without those that aren't known.

        Tokens are known where batches have `input_ids`.
        """
        now = time.perf_counter()
        seconds = 0.0 if self._begun is None else now - self._begun
        found = {f"{name}_per_s": number for name, number in self._since.items()} | {"flops_per_s": self._flops}
        self._begun, self._flops = now, 0.0
        self._since.clear()
        rates = {name: self.num_data_ranks * number / seconds for name, number in found.items() if number}
        return rates | {name: number for name, number in self.totals.items() if number}


SMOOTHED = 10
"""the number of batches that the reported last loss is a mean over"""


class WaveReport(Callback):
    """Logs how the pipeline runs, draws `wave.png` at the end, and prints a few lines about the results of a fit.

    Every `every_n_steps` batches all loggers get, of one batch:

    - `hanayo/bubble`: the fraction of all ranks' time in which they didn't compute;
    - `hanayo/exposed_communication`: the fraction in which they waited for messages that were computed, but had not
      arrived;
    - `hanayo/samples_per_s`, and `hanayo/tokens_per_s` if batches have `input_ids`: of all data ranks, over all batches
      since the last figures, without evaluations;
    - `hanayo/samples`, `hanayo/tokens`: how many have been trained on in all, before a resume, too;
    - `hanayo/device_flops_per_s`, if it is known what a batch computes: FLOP/s of each device in the same time, and
      `hanayo/mfu`, their share of what the device could do at the run's precision, if Lightning knows its chip;
    - `hanayo/stage_0/forward_ms`, `hanayo/stage_0/backward_ms` (or `backward_input_ms` and `backward_weight_ms`) and so
      on: the time of one micro-batch.

    The progress bar shows samples, tokens, and FLOP/s of a device (in units of 10^12), and the bubble.

    At the start they get layout, schedule, sizes, samples per step and seed as hyperparameters, at the end
    `hanayo/rank_0/peak_memory_bytes` and so on; loggers that take images get the pictures, too: `WandbLogger`,
    `TensorBoardLogger`. With a strategy other than `HanayoStrategy` nothing is reported. Every process needs the same
    `WaveReport`.

    A run with such a logger and without this callback logs the figures and the picture, and writes no files.

    Example:
        >>> trainer = L.Trainer(devices=4, strategy="hanayo", callbacks=[WaveReport(every_n_steps=100)])

    Args:
        every_n_steps: log every n-th batch; 0: none; None: the Trainer's `log_every_n_steps`.
        picture: file for the pipeline as it ran, above the predicted one; `schedule.png` is written too. None: no
            pictures. All files are written to `default_root_dir`.
        trace: file for the last batches, for ui.perfetto.dev; None: not written.
        profile: file for the times of stages and messages, for `HanayoStrategy(costs=...)`; None: not written.
        flops_per_batch: FLOPs of forward and backward of one data rank's batch. None: the module's attribute of this
            name, which `ThroughputMonitor` reads, too; else three forwards of `example_input_array`, in proportion to
            the samples.

    Raises:
        HanayoError: `every_n_steps` is below 0, or `flops_per_batch` not above 0.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        picture: str | None = "wave.png",
        trace: str | None = "trace.json",
        profile: str | None = "profile.json",
        flops_per_batch: float | None = None,
    ) -> None:
        if every_n_steps is not None and every_n_steps < 0:
            raise HanayoError(f"every_n_steps={every_n_steps!r}: expected a whole number of at least 0, or None")
        if flops_per_batch is not None and not flops_per_batch > 0:
            raise HanayoError(f"flops_per_batch={flops_per_batch!r}: expected a number above 0, or None")
        self._every_n_steps = every_n_steps
        self._files = {"picture": picture, "trace": trace, "profile": profile}
        self._first: torch.Tensor | None = None
        self._last: deque[torch.Tensor] = deque(maxlen=SMOOTHED)
        self._figures: BatchFigures | None = None
        self._flops_per_batch = flops_per_batch
        self._throughput: Throughput | None = None
        self._peak_flops: int | None = None
        self._batches = 0
        self._totals = {"samples": 0, "tokens": 0}
        self._peak: tuple[int, int] | None = None
        self._written: list[tuple[str, str]] = []

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        strategy = _strategy(trainer)
        if strategy is None:
            return
        self._batches = 0
        if strategy.data_rank == 0:
            self._figures = BatchFigures(strategy.pipeline)
        if trainer.is_global_zero:
            num_samples = strategy.pipeline.splitter.num_samples
            flops, said = step_flops(pl_module, self._flops_per_batch, num_samples)
            self._throughput = Throughput(num_samples, strategy.data_parallel_size, flops, totals=self._totals)
            self._peak_flops = peak_flops(trainer)
            self._introduce(trainer, pl_module, strategy)
            print(f"FLOPs of a step: {said}", flush=True)

    def _introduce(self, trainer: "pl.Trainer", module: "pl.LightningModule", strategy: CheckpointingStrategy) -> None:
        facts = run_facts(trainer, module, strategy)
        for logger in trainer.loggers:
            logger.log_hyperparams(facts)
        Path(trainer.default_root_dir).mkdir(parents=True, exist_ok=True)
        if self._files["picture"] is not None:
            picture = Path(trainer.default_root_dir, "schedule.png")
            save_timeline(picture, strategy.pipeline.layout.simulate(), title=_title(strategy), unit="T_F")
            _log_image(trainer, "hanayo/schedule", picture)
            measured = Path(trainer.default_root_dir, self._files["picture"])
            strategy.session.pictures = f"{_short(picture)}; {_short(measured)} at the end"

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _strategy(trainer) is None:
            return
        if trainer.is_global_zero and outputs and "loss" in outputs:
            loss = outputs["loss"].detach() * trainer.accumulate_grad_batches
            self._last.append(loss)
            self._first = loss if self._first is None else self._first
        figures = self._log(trainer)
        _show(pl_module, {"bubble": figures["hanayo/bubble"]} if figures else {})
        every = trainer.log_every_n_steps if self._every_n_steps is None else self._every_n_steps  # type: ignore[attr-defined]
        self._batches += 1
        if self._throughput is not None:
            self._throughput.note(batch)
            if every and self._batches % every == 0:
                self._log_throughput(trainer, pl_module, self._throughput.read())
        if every and self._batches % every == 0 and self._figures is not None:
            self._figures.start(logged_step(trainer))

    @override
    def state_dict(self) -> dict[str, Any]:
        return dict(self._totals)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._totals.update(state_dict)

    @override
    def on_validation_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self._throughput is not None:
            self._throughput.pause()

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self._throughput is not None:
            self._throughput.resume()

    def _log_throughput(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", figures: dict[str, float]
    ) -> None:
        shown = {f"{name}/s": figures[f"{name}_per_s"] for name in ("samples", "tokens") if f"{name}_per_s" in figures}
        if "flops_per_s" in figures:
            own = figures["device_flops_per_s"] = figures.pop("flops_per_s") / trainer.world_size
            shown["TFLOP/s"] = own / 1e12
            if self._peak_flops is not None:
                figures["mfu"] = own / self._peak_flops
        for logger in trainer.loggers if figures else ():
            logger.log_metrics({f"hanayo/{name}": value for name, value in figures.items()}, step=logged_step(trainer))
        _show(pl_module, shown)

    def _log(self, trainer: "pl.Trainer") -> dict[str, float]:
        """Log the figures of a batch that was chosen, once they are known. Returns them on rank 0; else nothing."""
        read = self._figures.read() if self._figures is not None else None
        if read is None or not trainer.is_global_zero:
            return {}
        step, figures = read
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=step)
        return figures

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._figures = self._throughput = None

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        strategy = _strategy(trainer)
        if strategy is None:
            return
        for _ in range(2):  # the last batch's figures come after two more
            self._log(trainer)
        self._figures = self._throughput = None
        if strategy.data_rank > 0:
            return
        measured, peaks = MeasuredBatches.of(strategy.pipeline), peak_memory(strategy)
        if not trainer.is_global_zero:
            return
        self._peak = max((peak, rank) for rank, peak in peaks.items())
        at_end: dict[str, float] = {f"hanayo/rank_{rank}/peak_memory_bytes": peak for rank, peak in peaks.items()}
        if measured is not None:
            self._write_files(trainer, strategy, measured)
            at_end["hanayo/bubble"] = measured.timeline.bubble_ratio
            at_end["hanayo/bubble_from_costs"] = measured.predicted.bubble_ratio
        for logger in trainer.loggers:
            logger.log_metrics(at_end)

    def _write_files(self, trainer: "pl.Trainer", strategy: CheckpointingStrategy, measured: MeasuredBatches) -> None:
        """Write the requested files."""
        paths = {what: Path(trainer.default_root_dir, name) for what, name in self._files.items() if name is not None}
        if "picture" in paths:
            _draw(trainer, strategy, measured, paths["picture"])
        if "trace" in paths:
            measured.save_trace(paths["trace"])
        if "profile" in paths:
            measured.profile(strategy.pipeline).save(paths["profile"])
        ran, simulated = measured.timeline.bubble_ratio, measured.predicted.bubble_ratio
        said = {
            "picture": f"bubble {ran:.1%} as it ran, {simulated:.1%} simulated",
            "trace": "open it in ui.perfetto.dev",
            "profile": "plan with it: HanayoStrategy(costs=...)",
        }
        names = {"picture": "pipeline", "trace": "trace", "profile": "profile"}
        self._written = [(names[what], f"{_short(path)} ({said[what]})") for what, path in paths.items()]

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if trainer.is_global_zero and stage == "fit" and _strategy(trainer) is not None:
            bar = trainer.progress_bar_callback
            if bar is not None:
                bar.teardown(trainer, pl_module, stage)  # its last frame, before the last lines
            runs = [_finish(logger) for logger in trainer.loggers if isinstance(logger, WandbLogger)]
            print("\n" + "\n".join(self._lines(trainer, runs)), flush=True)

    def _lines(self, trainer: "pl.Trainer", runs: list[str]) -> list[str]:
        rows: list[tuple[str, str]] = []
        if self._first is not None:
            last = float(torch.stack(list(self._last)).mean())
            count = trainer.fit_loop.epoch_loop.total_batch_idx + 1
            losses = f"{float(self._first):.3f} at the first batch, {last:.3f} over the last {len(self._last)}"
            rows.append(("train loss", f"{losses} of {count}"))
        rows += [
            (name, f"{float(value):.3f}") for name, value in trainer.callback_metrics.items() if name.startswith("val")
        ]
        checkpoint = trainer.checkpoint_callback
        if isinstance(checkpoint, ModelCheckpoint) and checkpoint.best_model_path:
            rows.append(("checkpoint", _short(checkpoint.best_model_path)))
        if self._peak is not None:
            rows.append(("peak memory", f"{self._peak[0] / 1e9:.2f} GB, on rank {self._peak[1]}"))
        rows += [("wandb run", run) for run in runs]
        rows += self._written
        width = max((len(name) for name, _ in rows), default=0)
        return [f"{name:<{width}}  {text}" for name, text in rows]


class LoggedReport(WaveReport):
    """The report of a run that asked for none, and whose logger takes images: figures and the picture of a step."""

    @staticmethod
    def add_to(trainer: "pl.Trainer") -> None:
        """Add it, if that is so. Called by all ranks."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        draws = any(isinstance(one, WandbLogger | TensorBoardLogger) for one in trainer.loggers)
        if draws and not any(isinstance(one, WaveReport) for one in callbacks):
            callbacks.insert(0, LoggedReport())

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        strategy = _strategy(trainer)
        if strategy is not None and strategy.data_rank == 0:
            self._batches, self._figures = 0, BatchFigures(strategy.pipeline)
            strategy.session.pictures = "hanayo/wave in the logger, at the end"

    @override
    def state_dict(self) -> dict[str, Any]:
        return {}  # a checkpoint doesn't depend on loggers

    def _write_files(self, trainer: "pl.Trainer", strategy: CheckpointingStrategy, measured: MeasuredBatches) -> None:
        with TemporaryDirectory() as folder:
            _draw(trainer, strategy, measured, Path(folder, "wave.png"))

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        """Say nothing: nobody has asked."""


def _show(module: "pl.LightningModule", values: dict[str, float]) -> None:
    """In the progress bar alone."""
    for name, value in values.items():
        module.log(name, value, prog_bar=True, logger=False, rank_zero_only=True, batch_size=1)


def _strategy(trainer: "pl.Trainer") -> CheckpointingStrategy | None:
    return trainer.strategy if isinstance(trainer.strategy, CheckpointingStrategy) else None


def _title(strategy: CheckpointingStrategy) -> str:
    layout = strategy.pipeline.layout
    return (
        f"{layout.schedule}: {counted(layout.num_ranks, 'pipeline rank')}, {counted(layout.num_waves, 'wave')}, "
        f"{counted(layout.num_microbatches, 'micro-batch')}"
    )


def _draw(trainer: "pl.Trainer", strategy: CheckpointingStrategy, measured: MeasuredBatches, path: Path) -> None:
    """Draw the last batches above the predicted ones, for all loggers that take images."""
    planned = strategy.pipeline.layout.predict()
    save_comparison(path, measured.timeline, measured.predicted, title=_title(strategy), planned=planned)
    _log_image(trainer, "hanayo/wave", path)


def _log_image(trainer: "pl.Trainer", name: str, path: Path) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(name, [str(path)])
        elif isinstance(logger, TensorBoardLogger):
            from matplotlib.image import imread

            logger.experiment.add_image(name, imread(path), global_step=logged_step(trainer), dataformats="HWC")


def _finish(logger: WandbLogger) -> str:
    """End the run, so that wandb prints its last lines before ours; return where it is stored."""
    run = logger.experiment
    directory = _short(Path(run.dir).parent)
    upload = f" (offline; upload it with: wandb sync {directory})" if run.offline else ""
    run.finish()
    return directory + upload


def _short(path: str | Path) -> str:
    """Relative to the working directory, if it is inside."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

"""`WaveReport`: how the pipeline really ran, as figures for loggers, tables, files and pictures.

at the start       `run_facts`          layout, sizes, samples, seed
single batches     `figures`            bubble and times of stages
                   `Throughput`         samples, tokens and FLOPs per second (`step_flops`), by the host's clock
at the end         `MeasuredBatches`    the last batches, as they ran: pictures, a trace, a profile of costs
"""

import os
import resource
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.errors import HanayoError, counted
from lightning_hanayo.pipeline_parallel.object_collectives import gather_objects
from lightning_hanayo.pipeline_parallel.trace import (
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
from lightning_hanayo.planner.layout import Layout
from lightning_hanayo.plotting import save_comparison, save_timeline, save_trace
from lightning_hanayo.schedule import Kind, Schedule, simulate
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


@dataclass
class MeasuredBatches:
    """Batches of one size, in the order in which they ran, and their schedule."""

    schedule: Schedule
    batches: tuple[BatchTrace, ...]

    def __post_init__(self) -> None:
        self.timeline = timeline_of(self.schedule, median_batch(self.batches))
        """the batch whose duration is the median one, in seconds"""
        self.costs = costs_of(self.schedule, self.batches)
        """times of stages and messages, in seconds"""
        self.predicted = simulate(self.schedule, self.costs)
        """the same batch, simulated with `costs`"""

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
    _last: float | None = field(default=None, init=False)
    """when the time began that isn't counted yet"""
    _since: Counter[str] = field(default_factory=Counter, init=False)
    """of one data rank, since the last reading"""

    def note(self, batch: Any) -> None:
        """A batch has been trained. The first one, in which much is set up, only begins the measurement of time."""
        now, ids = time.perf_counter(), batch.get("input_ids") if isinstance(batch, Mapping) else None
        found = {"samples": self.count(batch), "tokens": ids.numel() if isinstance(ids, Tensor) else 0}
        for name, number in found.items():
            self.totals[name] += self.num_data_ranks * number
        if self._last is not None:
            self._since.update(found | {"flops": self.flops(batch), "seconds": now - self._last})
        self._last = now

    def skip(self) -> None:
        """Something else than training has ended, which began after the last batch."""
        self._last = time.perf_counter()

    def read(self) -> dict[str, float]:
        """The figures since the last reading and the totals, of all data ranks; without those that aren't known.

        Tokens are known where batches have `input_ids`.
        """
        since, self._since = self._since, Counter()
        found = {name: number for name, number in since.items() if number and name != "seconds"}
        rates = {f"{name}_per_s": self.num_data_ranks * number / since["seconds"] for name, number in found.items()}
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
        self._pipeline: Pipeline | None = None
        """on the ranks of the first replica, in a training"""
        self._noted: tuple[int, RecordedBatch] | None = None
        """a batch whose figures are to be logged, and its number for loggers: a device may still be running it"""
        self._first: Tensor | None = None
        self._last: deque[Tensor] = deque(maxlen=SMOOTHED)
        self._flops_per_batch = flops_per_batch
        self._throughput: Throughput | None = None
        self._peak_flops: int | None = None
        self._batches = 0
        self._totals = {"samples": 0, "tokens": 0}
        self._rows: list[tuple[str, str]] = []
        """of the lines at the end"""

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, CheckpointingStrategy) or strategy.data_rank > 0:
            return
        self._pipeline, self._batches = strategy.pipeline, 0
        if not trainer.is_global_zero:
            return
        num_samples = self._pipeline.splitter.num_samples
        flops, said = step_flops(pl_module, self._flops_per_batch, num_samples)
        self._throughput = Throughput(num_samples, strategy.data_parallel_size, flops, totals=self._totals)
        self._peak_flops = peak_flops(trainer)
        facts = run_facts(trainer, pl_module, strategy)
        for logger in trainer.loggers:
            logger.log_hyperparams(facts)
        root, name, layout = Path(trainer.default_root_dir), self._files["picture"], self._pipeline.layout
        root.mkdir(parents=True, exist_ok=True)
        if name is not None:
            planned = root / "schedule.png"
            save_timeline(planned, layout.simulate(), title=_title(layout), unit="T_F")
            _log_image(trainer, "hanayo/schedule", planned)
            print(f"pictures: {_short(planned)}; {_short(root / name)} at the end")
        print(f"FLOPs of a step: {said}", flush=True)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._pipeline is None:
            return
        if trainer.is_global_zero and outputs and "loss" in outputs:
            loss = outputs["loss"].detach() * trainer.accumulate_grad_batches
            self._last.append(loss)
            self._first = loss if self._first is None else self._first
        shown = self._log_noted(trainer, self._pipeline)
        every = trainer.log_every_n_steps if self._every_n_steps is None else self._every_n_steps  # type: ignore[attr-defined]
        self._batches += 1
        logs = bool(every) and self._batches % every == 0
        if self._throughput is not None:
            self._throughput.note(batch)
            shown |= self._log_throughput(trainer, self._throughput.read()) if logs else {}
        if logs and (recorded := self._pipeline.engine.trace.recorded):
            self._noted = logged_step(trainer), recorded[-1]
        for name, value in shown.items():  # in the progress bar alone
            pl_module.log(name, value, prog_bar=True, logger=False, rank_zero_only=True, batch_size=1)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name: number for name, number in self._totals.items() if number}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._totals.update(state_dict)

    @override
    def on_validation_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        if self._throughput is not None:
            self._throughput.skip()

    def _log_throughput(self, trainer: "pl.Trainer", figures: dict[str, float]) -> dict[str, float]:
        """Log figures of all data ranks. Returns those that the progress bar shows."""
        shown = {f"{name}/s": figures[f"{name}_per_s"] for name in ("samples", "tokens") if f"{name}_per_s" in figures}
        if "flops_per_s" in figures:
            own = figures["device_flops_per_s"] = figures.pop("flops_per_s") / trainer.world_size
            shown["TFLOP/s"] = own / 1e12
            if self._peak_flops is not None:
                figures["mfu"] = own / self._peak_flops
        for logger in trainer.loggers if figures else ():
            logger.log_metrics({f"hanayo/{name}": value for name, value in figures.items()}, step=logged_step(trainer))
        return shown

    def _log_noted(self, trainer: "pl.Trainer", pipeline: Pipeline) -> dict[str, float]:
        """Log the figures of the noted batch. Returns those that the progress bar shows, on rank 0.

        Called by all ranks of the pipeline, after the next batch: its times are known, and the ranks above 0 send them.
        """
        if self._noted is None:
            return {}
        (step, recorded), self._noted = self._noted, None
        batch = gather_trace(pipeline.relay.transport, pipeline.layout.table, recorded.events)
        if batch is None or not trainer.is_global_zero:
            return {}
        found = figures(pipeline.layout.table(num_microbatches(batch[0])), batch)
        for logger in trainer.loggers:
            logger.log_metrics(found, step=step)
        return {"bubble": found["hanayo/bubble"]}

    @override
    def on_exception(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException) -> None:
        self._pipeline = self._noted = self._throughput = None

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        strategy, pipeline = trainer.strategy, self._pipeline
        if pipeline is None or not isinstance(strategy, CheckpointingStrategy):
            return
        self._log_noted(trainer, pipeline)
        self._pipeline = self._throughput = None
        measured, peaks = MeasuredBatches.of(pipeline), peak_memory(strategy)
        if not trainer.is_global_zero:
            return
        peak, fullest = max((peak, rank) for rank, peak in peaks.items())
        self._rows = [("peak memory", f"{peak / 1e9:.2f} GB, on rank {fullest}")]
        at_end: dict[str, float] = {f"hanayo/rank_{rank}/peak_memory_bytes": peak for rank, peak in peaks.items()}
        if measured is not None:
            self._write_files(trainer, pipeline, measured, Path(trainer.default_root_dir))
            at_end["hanayo/bubble"] = measured.timeline.bubble_ratio
            at_end["hanayo/bubble_from_costs"] = measured.predicted.bubble_ratio
        for logger in trainer.loggers:
            logger.log_metrics(at_end)

    def _write_files(self, trainer: "pl.Trainer", pipeline: Pipeline, measured: MeasuredBatches, root: Path) -> None:
        """Write the requested files; all loggers that take images get the picture, too."""
        layout, ran, simulated = pipeline.layout, measured.timeline, measured.predicted

        def draw(path: Path) -> None:
            save_comparison(path, ran, simulated, title=_title(layout), planned=layout.predict())
            _log_image(trainer, "hanayo/wave", path)

        bubbles = f"bubble {ran.bubble_ratio:.1%} as it ran, {simulated.bubble_ratio:.1%} simulated"
        kinds: dict[str, tuple[str, Callable[[Path], object], str]] = {
            "picture": ("pipeline", draw, bubbles),
            "trace": ("trace", measured.save_trace, "open it in ui.perfetto.dev"),
            "profile": ("profile", measured.profile(pipeline).save, "plan with it: HanayoStrategy(costs=...)"),
        }
        for kind, (name, save, said) in kinds.items():
            if (file := self._files[kind]) is not None:
                save(path := root / file)
                self._rows.append((name, f"{_short(path)} ({said})"))

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if trainer.is_global_zero and stage == "fit" and isinstance(trainer.strategy, CheckpointingStrategy):
            bar = trainer.progress_bar_callback
            if bar is not None:
                bar.teardown(trainer, pl_module, stage)  # its last frame, before the last lines
            rows = self._results(trainer) + self._rows
            rows += [("wandb run", _finish(logger)) for logger in trainer.loggers if isinstance(logger, WandbLogger)]
            width = max((len(name) for name, _ in rows), default=0)
            print("".join(f"\n{name:<{width}}  {text}" for name, text in rows), flush=True)

    def _results(self, trainer: "pl.Trainer") -> list[tuple[str, str]]:
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
        return rows


def _title(layout: Layout) -> str:
    return (
        f"{layout.schedule}: {counted(layout.num_ranks, 'pipeline rank')}, {counted(layout.num_waves, 'wave')}, "
        f"{counted(layout.num_microbatches, 'micro-batch')}"
    )


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

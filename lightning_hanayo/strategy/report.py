"""`WaveReport`, a callback that logs how the pipeline runs, next to the prediction, and says where results are."""

from collections import deque
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting import save_comparison, save_timeline
from lightning_hanayo.strategy.lightning.inspection.flops import peak_flops
from lightning_hanayo.strategy.lightning.progress import logged_step
from lightning_hanayo.strategy.report.batch_figures import BatchFigures
from lightning_hanayo.strategy.report.measured_batches import MeasuredBatches
from lightning_hanayo.strategy.report.run_facts import peak_memory, run_facts
from lightning_hanayo.strategy.report.step_flops import StepFlops
from lightning_hanayo.strategy.report.throughput import Throughput
from lightning_hanayo.strategy.strategy import HanayoStrategy

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
    `hanayo/rank_0/peak_memory_bytes` and so on; a `WandbLogger` gets the pictures, too. With a strategy other than
    `HanayoStrategy` nothing is reported. Every process needs the same `WaveReport`.

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
            raise HanayoError(f"every_n_steps={every_n_steps!r}: expected a whole number from 0 on, or None")
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
            flops = StepFlops.find(pl_module, self._flops_per_batch, num_samples)
            self._throughput = Throughput(num_samples, strategy.data_parallel_size, flops.of_batch, totals=self._totals)
            self._peak_flops = peak_flops(trainer)
            self._introduce(trainer, pl_module, strategy)
            print(f"FLOPs of a step: {flops.said}", flush=True)

    def _introduce(self, trainer: "pl.Trainer", module: "pl.LightningModule", strategy: HanayoStrategy) -> None:
        facts = run_facts(trainer, module, strategy)
        for logger in trainer.loggers:
            logger.log_hyperparams(facts)
        Path(trainer.default_root_dir).mkdir(parents=True, exist_ok=True)
        if self._files["picture"] is not None:
            picture = Path(trainer.default_root_dir, "schedule.png")
            save_timeline(picture, strategy.pipeline.layout.simulate(), title=_title(strategy), unit="T_F")
            _log_image(trainer, "hanayo/schedule", picture)

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
        if self._figures is not None:
            self._figures.forget()
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
            self._write(trainer, strategy, measured)
            at_end["hanayo/bubble"] = measured.timeline.bubble_ratio
            at_end["hanayo/bubble_from_costs"] = measured.predicted.bubble_ratio
        for logger in trainer.loggers:
            logger.log_metrics(at_end)

    def _write(self, trainer: "pl.Trainer", strategy: HanayoStrategy, measured: MeasuredBatches) -> None:
        """Write the requested files."""
        paths = {what: Path(trainer.default_root_dir, name) for what, name in self._files.items() if name is not None}
        if "picture" in paths:
            planned = strategy.pipeline.layout.predict()
            save_comparison(
                paths["picture"], measured.timeline, measured.predicted, title=_title(strategy), planned=planned
            )
            _log_image(trainer, "hanayo/wave", paths["picture"])
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


def _show(module: "pl.LightningModule", values: dict[str, float]) -> None:
    """In the progress bar alone."""
    for name, value in values.items():
        module.log(name, value, prog_bar=True, logger=False, rank_zero_only=True, batch_size=1)


def _strategy(trainer: "pl.Trainer") -> HanayoStrategy | None:
    return trainer.strategy if isinstance(trainer.strategy, HanayoStrategy) else None


def _title(strategy: HanayoStrategy) -> str:
    layout = strategy.pipeline.layout
    return (
        f"{layout.schedule}: {layout.num_ranks} pipeline ranks, {layout.num_waves} waves, "
        f"{layout.num_microbatches} micro-batches"
    )


def _log_image(trainer: "pl.Trainer", name: str, path: Path) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger):
            logger.log_image(name, [str(path)])


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

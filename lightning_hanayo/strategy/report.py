"""The report: what a run was laid out as, how it really ran beside the prediction, and where its results lie."""

import json
from collections import deque
from pathlib import Path
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import WandbLogger
from typing_extensions import override

from lightning_hanayo.checkpoint.gather import gather
from lightning_hanayo.planner.layout import COSTS
from lightning_hanayo.plotting import save_comparison, save_schedule
from lightning_hanayo.runtime.measurement import Batch, costs_of, timeline_of, typical
from lightning_hanayo.runtime.trace import Event
from lightning_hanayo.schedule import Action, Timeline, simulate
from lightning_hanayo.strategy.pipeline import Pipeline
from lightning_hanayo.strategy.strategy import HanayoStrategy

SMOOTHED = 10
"""how many batches the losses that are reported are means over"""


class WaveReport(Callback):
    """Draws `wave.png` (the pipeline as it ran above the predicted one) and ends a fit with a few lines on its results.

    With a `WandbLogger`, layout, schedule, bubbles and pictures go into the run. Files lie in `default_root_dir`.
    """

    def __init__(self) -> None:
        self._first: torch.Tensor | None = None
        self._last: deque[torch.Tensor] = deque(maxlen=SMOOTHED)
        self._wave: tuple[Path, Timeline, Timeline] | None = None

    @override
    def on_train_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        strategy = _strategy(trainer)
        if not trainer.is_global_zero or strategy is None:
            return
        layout = describe(strategy)
        picture = Path(trainer.default_root_dir, "schedule.png")
        picture.parent.mkdir(parents=True, exist_ok=True)
        pipeline = strategy.pipeline
        save_schedule(picture, pipeline.layout.table(pipeline.layout.num_microbatches), COSTS, unit="T_F")
        for logger in trainer.loggers:
            logger.log_hyperparams(layout)
            if isinstance(logger, WandbLogger):
                logger.log_image("hanayo/schedule", [str(picture)])
        print("".join(f"{name}: {value}\n" for name, value in layout.items()), end="", flush=True)

    @override
    def on_train_batch_end(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_global_zero and outputs and "loss" in outputs:
            loss = outputs["loss"].detach() * trainer.accumulate_grad_batches
            self._last.append(loss)
            self._first = loss if self._first is None else self._first

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        strategy = _strategy(trainer)
        if strategy is None:
            return
        batches = gather_traces(strategy.pipeline)
        if not batches or not trainer.is_global_zero:
            return
        layout = strategy.pipeline.layout
        whole = [batch for batch in batches if _num_microbatches(batch) == layout.num_microbatches] or batches
        batch = typical(whole)
        schedule = layout.table(_num_microbatches(batch))
        measured = timeline_of(schedule, batch)
        predicted = simulate(schedule, costs_of(schedule, whole))
        path = Path(trainer.default_root_dir, "wave.png")
        save_comparison(path, measured, predicted, title=_title(strategy))
        self._wave = (path, measured, predicted)
        for logger in trainer.loggers:
            bubbles = {"hanayo/bubble": measured.bubble_ratio, "hanayo/bubble_from_costs": predicted.bubble_ratio}
            logger.log_metrics(bubbles)
            if isinstance(logger, WandbLogger):
                logger.log_image("hanayo/wave", [str(path)])

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if trainer.is_global_zero and stage == "fit":
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
        best = getattr(checkpoint, "best_model_path", "")
        if best:
            rows.append(("checkpoint", _short(best)))
        rows += [("wandb run", run) for run in runs]
        if self._wave is not None:
            path, measured, predicted = self._wave
            bubbles = f"bubble {measured.bubble_ratio:.1%} as it ran, {predicted.bubble_ratio:.1%} simulated"
            rows.append(("pipeline", f"{_short(path)} ({bubbles})"))
        width = max((len(name) for name, _ in rows), default=0)
        return [f"{name:<{width}}  {text}" for name, text in rows]


def describe(strategy: HanayoStrategy) -> dict[str, Any]:
    """The layout of a run, for people and for loggers."""
    layout, topology, ownership = strategy.pipeline.layout, strategy.topology, strategy.pipeline.ownership
    stages = [f"{run.start}-{run.stop - 1}" if len(run) > 1 else str(run.start) for run in ownership.stages if run]
    return {
        "hanayo/layout": f"{topology.pipe} pipeline x {topology.data} data = {topology.world_size} ranks",
        "hanayo/schedule_name": layout.schedule,
        "hanayo/num_waves": layout.num_waves,
        "hanayo/num_microbatches": layout.num_microbatches,
        "hanayo/stack": f"{ownership.stack.name}: {len(ownership.stack)} blocks, stages {' | '.join(stages)}",
        "hanayo/predicted_bubble": round(layout.predict(), 4),
    }


def gather_traces(pipeline: Pipeline) -> list[Batch]:
    """The kept batches of all ranks of a pipeline on its rank 0; nothing elsewhere. Called by all its ranks."""
    own = [[[str(e.action), e.asked, e.start, e.end] for e in events] for events in pipeline.engine.trace.batches]
    everything = gather(pipeline.chain.transport, json.dumps(own))
    if everything is None:
        return []
    ranks = [[[_event(*event) for event in events] for events in json.loads(text)] for text in everything]
    return cast(list[Batch], [list(batch) for batch in zip(*ranks, strict=True)])


def _event(action: str, asked: float, start: float, end: float) -> Event:
    return Event(Action.parse(action), asked, start, end)


def _num_microbatches(batch: Batch) -> int:
    return 1 + max(event.action.microbatch or 0 for events in batch for event in events)


def _strategy(trainer: "pl.Trainer") -> HanayoStrategy | None:
    return trainer.strategy if isinstance(trainer.strategy, HanayoStrategy) else None


def _title(strategy: HanayoStrategy) -> str:
    layout = strategy.pipeline.layout
    return (
        f"{layout.schedule}: {layout.num_ranks} pipeline ranks, {layout.num_waves} waves, "
        f"{layout.num_microbatches} micro-batches"
    )


def _finish(logger: WandbLogger) -> str:
    """End the run, which makes wandb say its last words before ours; return where it lies."""
    run = logger.experiment
    directory = _short(Path(run.dir).parent)
    upload = f" (offline; upload it with: wandb sync {directory})" if run.offline else ""
    run.finish()
    return directory + upload


def _short(path: str | Path) -> str:
    """Relative to the working directory, if it lies there."""
    path = Path(path).absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

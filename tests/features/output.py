"""Features: what a run shows and writes: progress bars, summaries, profiles, predictions."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    ModelSummary,
    RichModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    TQDMProgressBar,
)
from lightning.pytorch.profilers import (
    AdvancedProfiler,
    PassThroughProfiler,
    Profiler,
    PyTorchProfiler,
    SimpleProfiler,
)
from lightning.pytorch.utilities.model_summary import summarize

from tests.features.feature import AsDDP, Equal, Feature, RefusedByLightning, on
from tests.features.net import Sampled
from tests.features.trial import Trial, fit, predict
from tests.features.with_callbacks import with_callbacks


class Writer(BasePredictionWriter):
    """Writes, as its documentation shows."""

    def __init__(self, folder: Path, interval: Any) -> None:
        super().__init__(interval)
        self.folder = folder

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, *where: Any
    ) -> None:
        name = f"batch_{where[1]}_{trainer.global_rank}.pt"
        torch.save((prediction, batch_indices), self.folder / name)

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        torch.save((predictions, batch_indices), self.folder / f"epoch_{trainer.global_rank}.pt")


def write_predictions(trial: Trial) -> None:
    """Each sample is written once, with its index."""
    predict(trial)
    trial.trainer.strategy.barrier()
    if trial.trainer.is_global_zero:
        rows = [torch.load(path) for path in sorted(trial.folder.glob("*.pt"))]
        of_batches = [pair for pair in rows if isinstance(pair[0], torch.Tensor)]
        of_epochs = [
            pair for many, where in rows if isinstance(many, list) for pair in zip(many, _flat(where), strict=True)
        ]
        trial.record(written=_by_index(of_batches + of_epochs))


def _flat(indices: Any) -> Any:
    """Of the one loader."""
    return indices[0] if isinstance(indices[0][0], list) else indices


def _by_index(pairs: Any) -> list[Any]:
    found = {index: row for rows, indices in pairs for row, index in zip(rows, indices, strict=True)}
    return [found[index] for index in sorted(found)]


class Actions(Profiler):
    """Notes the names of actions, of which hooks of the strategy have the strategy's name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def start(self, action_name: str) -> None:
        self.names.append(action_name)

    def stop(self, action_name: str) -> None:
        pass


def profiled_actions(trial: Trial) -> None:
    fit(trial)
    names = trial.trainer.profiler.names  # type: ignore[attr-defined]
    strategy = type(trial.trainer.strategy).__name__
    if trial.trainer.is_global_zero:
        trial.record(actions=[name.replace(strategy, "Strategy") for name in names])


def summary_text(trial: Trial) -> None:
    trial.record(before=str(summarize(trial.module, max_depth=2)))
    fit(trial)


FEATURES = [
    Feature("`ModelSummary`", with_callbacks(ModelSummary(max_depth=2)), script=summary_text),
    Feature("`RichModelSummary`", with_callbacks(RichModelSummary())),
    Feature("`TQDMProgressBar`", with_callbacks(TQDMProgressBar(), enable_progress_bar=True)),
    Feature("`RichProgressBar`", with_callbacks(RichProgressBar(), enable_progress_bar=True)),
    Feature(
        '`BasePredictionWriter("batch")`',
        lambda folder: {"callbacks": Writer(folder, "batch")},
        data=Sampled,
        script=write_predictions,
    ),
    Feature(
        '`BasePredictionWriter("epoch")`',
        lambda folder: {"callbacks": Writer(folder, "epoch")},
        data=Sampled,
        script=write_predictions,
    ),
    Feature(
        "`ThroughputMonitor`",
        with_callbacks(ThroughputMonitor(lambda batch: len(batch["y"]))),
        outcomes=on(Equal(), AsDDP()),
        note="without times; samples of rank 0",
    ),
    Feature('`SimpleProfiler`, `profiler="simple"`', lambda folder: {"profiler": SimpleProfiler(folder, "times")}),
    Feature(
        '`AdvancedProfiler`, `profiler="advanced"`', lambda folder: {"profiler": AdvancedProfiler(folder, "calls")}
    ),
    Feature(
        '`PyTorchProfiler`, `profiler="pytorch"`',
        lambda folder: {"profiler": PyTorchProfiler(folder, "trace")},
        note="the run; not the trace",
    ),
    Feature(
        "`PyTorchProfiler(emit_nvtx=True)`",
        lambda folder: {"profiler": PyTorchProfiler(folder, "trace", emit_nvtx=True)},
        outcomes=on(RefusedByLightning("CUDA|NVIDIA")),
        note="without a GPU",
    ),
    Feature("`PassThroughProfiler`, the default", lambda _: {"profiler": PassThroughProfiler()}),
    Feature(
        '`XLAProfiler`, `profiler="xla"`',
        lambda _: {"profiler": "xla"},
        outcomes=on(RefusedByLightning("torch_xla")),
        note="without its package",
    ),
    Feature(
        "a `Profiler` of the user's",
        lambda _: {"profiler": Actions()},
        script=profiled_actions,
        note="the order of actions",
    ),
]

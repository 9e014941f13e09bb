"""Options and scripts that features of callbacks share."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning import Callback

from tests.features.trial import Trial, fit


def with_callbacks(*callbacks: Callback, **options: Any) -> Callable[[Path], dict[str, Any]]:
    """Makes the Trainer's options with copies of these callbacks."""
    return lambda _: {"callbacks": [copy.deepcopy(callback) for callback in callbacks]} | options


def recording(kind: type[Callback], *names: str) -> Callable[[Trial], None]:
    """A script that fits, and records attributes of a callback."""

    def script(trial: Trial) -> None:
        fit(trial)
        callback = next(callback for callback in trial.trainer.callbacks if isinstance(callback, kind))
        trial.record(**{name: _plain(getattr(callback, name), trial.folder) for name in names})

    return script


def _plain(value: Any, folder: Path) -> Any:
    """Paths relative to the trial's folder, numbers as numbers."""
    if isinstance(value, dict):
        return {_plain(name, folder): _plain(one, folder) for name, one in value.items()}
    if isinstance(value, torch.Tensor):
        return float(value)
    return value.replace(str(folder), "") if isinstance(value, str) else value

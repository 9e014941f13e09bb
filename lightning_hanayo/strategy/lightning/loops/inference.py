"""Lets `validate`, `test` and `predict` run in inference mode over gloo, too, if the Trainer was asked for it.

Lightning uses `torch.no_grad` with gloo, whose collectives once failed in inference mode. A validation within `fit`
never runs in inference mode.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_hanayo.strategy.temporary_attributes import TemporaryAttributes


def keep_inference_mode(trainer: "pl.Trainer", attributes: TemporaryAttributes) -> None:
    """Run the loops in the mode that the Trainer was given, until `attributes` are restored."""
    for loop in (trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        if loop.inference_mode:
            attributes.set(loop, "run", partial(_in_inference_mode, loop.run))


def _in_inference_mode(run: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return run()

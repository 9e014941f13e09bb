"""Habits: training that starts from weights in a folder of safetensors, which `init_from` names."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_hanayo import HanayoStrategy
from tests.habits.habit import EXACT, Habit, everywhere
from tests.harness import models

VECTORS = partial(models.vectors, (8, 8, 6), torch.float64)
TEXTS = partial(models.texts, (8, 8, 8))
FOLDER = "pretrained-{}"
"""in the working directory, which the ranks of a test share"""


def save(model: nn.Module, name: str) -> Path:
    """Write weights that aren't the initial ones. All ranks write the same."""
    folder, random = Path(FOLDER.format(name)), torch.Generator().manual_seed(5)
    folder.mkdir(exist_ok=True)
    weights = {name: torch.randn(p.shape, generator=random) * 0.3 for name, p in model.named_parameters()}
    part = folder / str(os.getpid())
    save_file(weights, part, {"format": "pt"})
    part.replace(folder / "model.safetensors")
    return folder


class Tuned(models.Trained):
    """What users write: `from_config`, and in one process `from_pretrained`."""

    def __init__(self) -> None:
        super().__init__()
        model: Any = models.gpt2().model
        self.config = model.config
        self.folder = save(model, "gpt2")
        self.config.save_pretrained(self.folder)

    def configure_model(self) -> None:
        from transformers import GPT2LMHeadModel
        from transformers.utils import logging

        logging.disable_progress_bar()  # its thread would outlive the test
        if hasattr(self, "net"):
            return
        if isinstance(self.trainer.strategy, HanayoStrategy):
            self.net: Any = GPT2LMHeadModel(self.config)
        else:
            self.net = GPT2LMHeadModel.from_pretrained(self.folder).train()

    def loss(self, batch: models.Batch) -> Tensor:
        tokens = batch["input_ids"]
        return cross_entropy(self.net(tokens).logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Filled(models.MLP):
    """A model of one's own that has values already, which the folder's replace."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = save(self, "mlp")

    def on_fit_start(self) -> None:
        if not isinstance(self.trainer.strategy, HanayoStrategy):
            load_model(self, self.folder / "model.safetensors")
            self.double()


def double() -> dict[str, Any]:
    return {"precision": "64-true"}


HABITS = [
    Habit(
        "`from_config` in `configure_model`, with `init_from=folder` in place of `from_pretrained(folder)`",
        Tuned,
        TEXTS,
        everywhere(EXACT),
        always_exact=True,
        strategy={"init_from": FOLDER.format("gpt2")},
        trainer=double,
    ),
    Habit(
        "`init_from=folder` for a model of your own, built in `__init__`",
        Filled,
        VECTORS,
        everywhere(EXACT),
        always_exact=True,
        strategy={"init_from": FOLDER.format("mlp")},
    ),
]

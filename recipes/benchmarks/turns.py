"""The turns: short fits of the GPT recipe, plain and under our strategy, one after the other in one process.

round 0   plain   ours          each fit: the same model, the same batches, its first steps not timed
round 1   ours    plain
"""

import gc
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import HanayoError
from recipes.benchmarks.result import Spread
from recipes.gpt.module import GPT

RECIPE = Path(__file__).parents[1] / "gpt" / "wave.yaml"
WARM_UP = 5
"""steps at the beginning of each fit that aren't timed"""
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Plan:
    """What is trained, and how often."""

    rounds: int
    steps: int
    batch_size: int
    blocks: int
    accelerator: str


@dataclass(frozen=True)
class Outcome:
    """Step times in seconds, medians of each fit; ratios are each round's own."""

    precision: str
    plain_step: Spread
    our_step: Spread
    ratio: Spread
    cpu_ratio: Spread
    """of all the process's threads' time on a core, which others' work on the machine stretches less"""
    equal: bool
    """whether all losses and the last weights are the same to the last bit"""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(plan: Plan, precision: str) -> Outcome:
    """Fit in turn.

    Raises:
        HanayoError: the accelerator isn't there.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*(does not have many workers|no `val_dataloader`|Checkpoint directory)")
    found: dict[bool, list[_Fit]] = {False: [], True: []}
    for turn in range(plan.rounds):
        for ours in (turn % 2 == 1, turn % 2 == 0):
            found[ours].append(_fit(plan, precision, HanayoStrategy(num_microbatches=1) if ours else "auto"))
    plain, our = found[False], found[True]
    return Outcome(
        precision,
        Spread.of([fit.step for fit in plain]),
        Spread.of([fit.step for fit in our]),
        Spread.of([mine.step / other.step for mine, other in zip(our, plain, strict=True)]),
        Spread.of([mine.cpu / other.cpu for mine, other in zip(our, plain, strict=True)]),
        equal=all(map(plain[0].equals, plain + our)),
    )


@dataclass(frozen=True)
class _Fit:
    step: float
    cpu: float
    losses: list[Tensor]
    weights: list[Tensor]

    def equals(self, other: "_Fit") -> bool:
        """To the last bit."""
        return _equal(self.losses, other.losses) and _equal(self.weights, other.weights)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


class _Watched(GPT):
    """The recipe's model, which keeps its losses."""

    losses: list[Tensor]

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


class _Tokens(Dataset[Batch]):
    """Random ones: how long a step takes doesn't depend on the text. Notes when each batch is asked for."""

    def __init__(self, num_batches: int, batch_size: int, context: int, vocab_size: int) -> None:
        random = torch.Generator().manual_seed(1)
        self._tokens = torch.randint(vocab_size, (num_batches, batch_size, context + 1), generator=random)
        self.asked: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Batch:
        self.asked.append((time.perf_counter(), time.process_time()))
        return {"input_ids": self._tokens[index, :, :-1], "labels": self._tokens[index, :, 1:]}


def _fit(plan: Plan, precision: str, strategy: Any) -> _Fit:
    recipe = yaml.safe_load(RECIPE.read_text())
    options = recipe["model"]["init_args"] | {"num_layers": plan.blocks}
    torch.manual_seed(recipe["seed_everything"])
    model = _Watched(**options)
    model.losses = []
    steps = WARM_UP + plan.steps + 1  # a step ends when the next batch is asked for
    tokens = _Tokens(steps, plan.batch_size, options["context"], options["vocab_size"])
    gc.collect()
    _trainer(plan, precision, strategy, recipe["trainer"]["gradient_clip_val"]).fit(
        model, DataLoader(tokens, batch_size=None)
    )
    step, cpu = map(_median_difference, zip(*tokens.asked[WARM_UP:], strict=True))
    return _Fit(step, cpu, model.losses, [parameter.detach().cpu() for parameter in model.parameters()])


def _median_difference(clock: Sequence[float]) -> float:
    return median(end - start for start, end in pairwise(clock))


def _trainer(plan: Plan, precision: Any, strategy: Any, clip: float) -> L.Trainer:
    try:
        return L.Trainer(
            accelerator=plan.accelerator,
            devices=1,
            strategy=strategy,
            precision=precision,
            max_epochs=1,
            gradient_clip_val=clip,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (ValueError, L.fabric.utilities.exceptions.MisconfigurationException) as error:
        raise HanayoError(f"accelerator={plan.accelerator!r}: {error}") from error

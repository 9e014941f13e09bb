"""Runs two fits of the GPT recipe in one process, alternating step by step: the plain Trainer's and ours.

thread of plain    step 0          step 1          step 2          the same model and the same batches; the waiting
thread of ours             step 0          step 1          ...     thread waits in its data loader
"""

import gc
import logging
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from operator import truediv
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
from recipes.benchmarks.harness import Summary, keep_memory
from recipes.gpt.module import GPT

RECIPE = Path(__file__).parents[1] / "gpt" / "wave.yaml"
WARM_UP = 5
"""the first steps of each fit, which aren't timed"""
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class FitPlan:
    """The sizes of the fits, and how many there are."""

    rounds: int
    steps: int
    batch_size: int
    blocks: int
    accelerator: str


@dataclass(frozen=True)
class FitComparison:
    """Each figure is the median over a round's steps, summarised over the rounds. Times are in seconds."""

    precision: str
    plain_step: Summary
    our_step: Summary
    ratio: Summary
    """of each step to the plain step next to it"""
    cpu_ratio: Summary
    """the same for the CPU time of all threads, which other programs disturb less"""
    equal: bool
    """whether all losses and the final weights are equal bit for bit"""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(plan: FitPlan, precision: str) -> FitComparison:
    """Run all pairs of fits.

    Raises:
        HanayoError: the accelerator is not available.
    """
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*(does not have many workers|no `val_dataloader`|Checkpoint directory)")
    keep_memory()
    pairs = [_pair(plan, precision, ours_first=bool(turn % 2)) for turn in range(plan.rounds)]
    return FitComparison(
        precision,
        Summary.of([median(plain.steps) for plain, _ in pairs]),
        Summary.of([median(ours.steps) for _, ours in pairs]),
        Summary.of([median(map(truediv, ours.steps, plain.steps)) for plain, ours in pairs]),
        Summary.of([median(map(truediv, ours.cpu, plain.cpu)) for plain, ours in pairs]),
        equal=all(fit.equals(pairs[0][0]) for pair in pairs for fit in pair),
    )


@dataclass(frozen=True)
class _Fit:
    steps: list[float]
    cpu: list[float]
    losses: list[Tensor]
    weights: list[Tensor]

    def equals(self, other: "_Fit") -> bool:
        """Compare bit for bit."""
        return _equal(self.losses, other.losses) and _equal(self.weights, other.weights)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


class _Watched(GPT):
    """The recipe's model, which also keeps its losses."""

    losses: list[Tensor]

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach())
        return loss


class _Turn:
    """One of two threads that run in turn."""

    def __init__(self) -> None:
        self.other = self
        self._mine = threading.Semaphore(0)
        self._alone = False

    def begin(self) -> None:
        """Wait for the first turn."""
        self._mine.acquire()

    def give(self) -> None:
        """Let the other thread run, and wait for the next turn."""
        self.other.start()
        if not self.other._alone:
            self._mine.acquire()

    def start(self) -> None:
        """Let this thread run."""
        self._mine.release()

    def end(self) -> None:
        """End: the other thread continues alone."""
        self._alone = True
        self.other.start()


class _Tokens(Dataset[Batch]):
    """Random tokens, since a step's time doesn't depend on the text. Between two batches the other fit runs."""

    def __init__(self, turn: _Turn, num_batches: int, batch_size: int, context: int, vocab_size: int) -> None:
        random = torch.Generator().manual_seed(1)
        self._turn = turn
        self._tokens = torch.randint(vocab_size, (num_batches, batch_size, context + 1), generator=random)
        self.begins: list[tuple[float, float]] = []
        self.ends: list[tuple[float, float]] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> Batch:
        self.ends.append(_clocks())
        self._turn.give()
        self.begins.append(_clocks())
        return {"input_ids": self._tokens[index, :, :-1], "labels": self._tokens[index, :, 1:]}


def _clocks() -> tuple[float, float]:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a step has ended when its kernels have
    return time.perf_counter(), time.process_time()


def _pair(plan: FitPlan, precision: str, *, ours_first: bool) -> tuple[_Fit, _Fit]:
    """Run the plain fit and ours, alternating."""
    turns = _Turn(), _Turn()
    turns[0].other, turns[1].other = turns[1], turns[0]
    strategies = "auto", HanayoStrategy(num_microbatches=1)
    gc.collect()
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(_fit, plan, precision, *pair) for pair in zip(strategies, turns, strict=True)]
        turns[ours_first].start()
        plain, ours = (fit.result() for fit in running)
    return plain, ours


def _fit(plan: FitPlan, precision: str, strategy: Any, turn: _Turn) -> _Fit:
    turn.begin()
    try:
        recipe = yaml.safe_load(RECIPE.read_text())
        options = recipe["model"]["init_args"] | {"num_layers": plan.blocks}
        torch.manual_seed(recipe["seed_everything"])
        model = _Watched(**options)
        model.losses = []
        batches = WARM_UP + plan.steps + 1  # a step ends when the next batch is requested
        tokens = _Tokens(turn, batches, plan.batch_size, options["context"], options["vocab_size"])
        trainer = _trainer(plan, precision, strategy, recipe["trainer"]["gradient_clip_val"])
        trainer.fit(model, DataLoader(tokens, batch_size=None))
    finally:
        turn.end()
    spans = list(zip(tokens.begins, tokens.ends[1:], strict=False))[WARM_UP:]
    steps, cpu = ([end[clock] - begin[clock] for begin, end in spans] for clock in range(2))
    return _Fit(steps, cpu, model.losses, [parameter.detach().cpu() for parameter in model.parameters()])


def _trainer(plan: FitPlan, precision: Any, strategy: Any, clip: float) -> L.Trainer:
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

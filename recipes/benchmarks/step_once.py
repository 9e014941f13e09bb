"""Compares a step for each micro-batch with one for the whole batch, on emulated devices: time, bubble, activations.

python -m recipes.benchmarks.step_once --json step_once.json --table step_once.md
"""

import argparse
import resource
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic, perf_counter
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.strategy.probing.step_choice import StepChoice
from recipes.benchmarks.case import TORCHS, candidates
from recipes.benchmarks.case import Case as PipelineCase
from recipes.benchmarks.fits import fit_on_rank, random_batches
from recipes.benchmarks.harness import (
    LOOPBACK,
    Columns,
    Findings,
    ProcessOptions,
    Summary,
    describe,
    ms,
    new_parser,
    number,
    page,
    run,
    run_ranks,
    sleep_until,
    span,
    table,
)
from recipes.benchmarks.report import outcome_of
from recipes.benchmarks.rounds import Plan, run_all
from recipes.gpt.module import GPT

RANKS, BLOCKS_PER_RANK, WARM_UP = 4, 4, 2
READING = """\
Each rank computes for 20 ms in the forward of a micro-batch and for 40 ms in its backward; blocks sleep instead of
computing. The code outside the stack, on rank 0, takes nothing, or as long as a rank's blocks: once for each
micro-batch, or at once for all. The bubble is the part of all ranks' time in which they neither run blocks nor that
code. Activations are those of the fullest rank, at their peak; 1 is one micro-batch in a rank's whole share.
All but torch's are fits by a Trainer, with an optimizer step; torch's best schedule runs in its runtime alone.

    python -m recipes.benchmarks.step_once --json step_once.json --table docs/benchmarks/step_once.md"""


@dataclass(frozen=True)
class Candidate:
    """A way to run steps."""

    label: str
    schedule: str
    waves: int
    step: Any


CANDIDATES = (
    Candidate("hanayo W=1", "hanayo", 1, "microbatch"),
    Candidate("hanayo W=2", "hanayo", 2, "microbatch"),
    Candidate("1f1b", "1f1b", 1, "microbatch"),
    Candidate("gpipe", "gpipe", 1, "microbatch"),
    Candidate("hanayo W=1, step once", "hanayo", 1, "batch"),
    Candidate("hanayo W=2, step once", "hanayo", 2, "batch"),
)


@dataclass(frozen=True)
class Case:
    """What is run."""

    candidate: Candidate
    num_microbatches: int
    forward: float
    """seconds of a rank's share for one micro-batch"""
    outside: float
    """seconds of the code outside the stack for one micro-batch, forward"""
    steps: int


@dataclass(frozen=True)
class ProbeFigures:
    """What the probe of a first batch takes on rank 0, and a step without one."""

    probe: float
    """seconds"""
    step: float
    """seconds"""
    memory: float
    """MB by which the process's peak grows in the probe, before anything else has run"""
    step_memory: float
    """MB by which the first step raises that peak further"""


@dataclass(frozen=True)
class Row:
    """A case's figures. Times are in seconds per step."""

    case: Case
    step: Summary
    activations: float

    @property
    def bubble(self) -> float:
        """The part of the ranks' time in which nothing is computed."""
        case = self.case
        busy = 3 * case.num_microbatches * (RANKS * case.forward + case.outside)
        return 1 - busy / (RANKS * self.step.median)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: "Sleeping", seconds: float) -> Tensor:
        end = monotonic() + seconds
        ctx.block, ctx.seconds = block, seconds
        block.note(1)
        y = x * 1.0
        sleep_until(end)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        end = monotonic() + 2 * ctx.seconds
        ctx.block.note(-1)
        sleep_until(end)
        return gradient, None, None


class Sleeping(nn.Module):
    """A block that sleeps for `seconds` for each sample."""

    held = most = 0
    """forwards of all blocks of this process whose backward hasn't run"""

    def __init__(self, seconds: float, *, counts: bool = True) -> None:
        super().__init__()
        self.seconds, self.counts = seconds, counts
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """[samples, width] to the same."""
        y: Tensor = _Sleep.apply(x * self.weight, self, self.seconds * len(x))
        return y

    def note(self, change: int) -> None:
        """Count a forward, or a backward."""
        if self.counts:
            Sleeping.held += change
            Sleeping.most = max(Sleeping.most, Sleeping.held)


class Model(L.LightningModule):
    """Blocks, and a head on rank 0."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sleeping(case.forward / BLOCKS_PER_RANK) for _ in range(RANKS * BLOCKS_PER_RANK))
        self.head = Sleeping(case.outside, counts=False)
        self.starts: list[float] = []

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The mean square."""
        x = batch
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.starts.append(perf_counter())
        Sleeping.held = Sleeping.most = 0

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    parser = new_parser("step_once", __doc__)
    number(parser, "--microbatches", [4, 8, 16], "B, a case for each")
    number(parser, "--forward-ms", 20.0, "one micro-batch's forward through a rank's blocks", "MS")
    number(parser, "--steps", 5, "timed, after 2 others")
    return run(_measure, parser.parse_args(arguments))


COLUMNS: Columns = (
    ("B", lambda row: str(row.case.num_microbatches)),
    ("outside ms", lambda row: ms(row.case.outside, 0)),
    ("", lambda row: row.case.candidate.label),
    ("step ms", lambda row: ms(row.step.median)),
    ("min-max", lambda row: span(row.step)),
    ("bubble", lambda row: f"{100 * row.bubble:.1f} %"),
    ("activations", lambda row: f"{row.activations:.2f}"),
)


def _measure(options: argparse.Namespace) -> Findings:
    forward = options.forward_ms / 1e3
    cases = [
        Case(candidate, count, forward, outside, options.steps)
        for outside in (0.0, forward)
        for count in options.microbatches
        for candidate in CANDIDATES
    ]
    seconds = sum(12 * case.num_microbatches * (forward + case.outside) * (case.steps + WARM_UP) + 5 for case in cases)
    found = run_ranks(_run_all, cases, [ProcessOptions(True)] * RANKS, timeout=120 + 3 * seconds)
    rows = [
        Row(case, Summary.of(times), max(own[i][1] for _, own in found) / BLOCKS_PER_RANK)
        for i, (case, (times, _)) in enumerate(zip(cases, found[0][1], strict=True))
    ]
    machine = describe(LOOPBACK, found[0][0])
    rows += [_best_of_torch(count, forward, options.steps) for count in options.microbatches]
    rows.sort(key=lambda row: (row.case.outside, row.case.num_microbatches))
    (_, probe), _ = run_ranks(_probe, PROBED, [ProcessOptions(True)] * 2, timeout=300)
    text = page("# One step for the whole batch", machine, table(COLUMNS, rows), READING, _told(probe))
    return Findings(text, {"machine": machine, "rows": rows, "probe": probe})


def _best_of_torch(num_microbatches: int, forward: float, rounds: int) -> Row:
    """The fastest of torch's own schedules, without code outside the stack."""
    names = [name for name, kind in TORCHS.items() if kind]
    case = PipelineCase(RANKS, num_microbatches, forward, forward, forward, 32, 1)
    plan = Plan((case,), tuple(candidates(names, (1, 2))), rounds)
    found = run_ranks(run_all, plan, [ProcessOptions(True)] * RANKS, timeout=300)
    outcome = outcome_of(case, [records for _, (records,) in found])
    best = min(outcome.results, key=lambda one: one.step.median)
    of_torch = Candidate(f"torch's best: {best.label.removeprefix('torch ')}", best.name, 0, "")
    return Row(Case(of_torch, num_microbatches, forward, 0.0, rounds), best.step, best.peak_activations)


PROBED = (50257, 128, 8, 256, 8)
"""of a GPT: vocabulary, context, blocks, width, heads"""


def _told(probe: ProbeFigures) -> str:
    vocabulary, context, blocks, width, _ = PROBED
    return (
        f"## The probe\n\nA GPT of {blocks} blocks of width {width} with {vocabulary} tokens of vocabulary, on 2 "
        f"ranks, 4 micro-batches of one\nsequence of {context} tokens, fp32: the probe of a batch takes rank 0 "
        f"{probe.probe:.2f} s, a step {probe.step:.2f} s. The probe, which runs\nbefore anything else, raises the "
        f"process's peak by {probe.memory:.0f} MB, and the first step then by {probe.step_memory:.0f} MB more."
    )


def _probe(rank: int, sizes: tuple[int, int, int, int, int]) -> ProbeFigures:
    times: list[tuple[float, float]] = []
    trains_once = StepChoice.trains_once

    def timed(*arguments: Any, **options: Any) -> bool:
        before, start = _peak(), perf_counter()
        once = trains_once(*arguments, **options)
        times.append((perf_counter() - start, _peak() - before))
        return once

    StepChoice.trains_once = timed  # type: ignore[method-assign]
    warnings.filterwarnings("ignore", message=".*batch_size=None")
    vocabulary, context, *_ = sizes
    model, clock = GPT(*sizes), Clock()
    batches = random_batches(6, 4, context, vocabulary)
    fit_on_rank(rank, 2, model, batches, strategy=HanayoStrategy(2, 1, num_microbatches=4), callbacks=[clock])
    probe, memory = times[0] if times else (0.0, 0.0)
    steps = [after - before for (before, _), (after, _) in zip(clock.starts[1:], clock.starts[2:], strict=False)]
    return ProbeFigures(probe, median(steps), memory, clock.starts[1][1] - clock.starts[0][1] - memory)


class Clock(Callback):
    """When batches begin, and the process's peak then."""

    def __init__(self) -> None:
        self.starts: list[tuple[float, float]] = []

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.starts.append((perf_counter(), _peak()))


def _peak() -> float:
    """The process's peak so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _run_all(rank: int, cases: Sequence[Case]) -> list[tuple[list[float], int]]:
    """For each case the seconds of each step, and the most forwards that this rank has held at once."""
    found = []
    for case in cases:
        model = Model(case)
        strategy = HanayoStrategy(
            RANKS, case.candidate.waves, num_microbatches=case.num_microbatches, schedule=case.candidate.schedule,
            step=case.candidate.step,
        )  # fmt: skip
        batches = [torch.rand(case.num_microbatches, 8) for _ in range(case.steps + WARM_UP + 1)]
        warnings.filterwarnings("ignore", message=".*batch_size=None")
        fit_on_rank(rank, RANKS, model, batches, strategy=strategy)
        dist.barrier()
        starts = model.starts[WARM_UP:]
        found.append(([after - before for before, after in zip(starts, starts[1:], strict=False)], Sleeping.most))
    return found


if __name__ == "__main__":
    sys.exit(main())

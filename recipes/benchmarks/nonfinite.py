"""Measures what looking for NaN and infinite gradients costs: steps with nonfinite="raise" and "ignore", in turn.

python -m recipes.benchmarks.nonfinite --table docs/benchmarks/nonfinite.md
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
import yaml  # type: ignore[import-untyped]

from lightning_hanayo import HanayoStrategy
from recipes.benchmarks.fits import fit_on_rank, random_batches
from recipes.benchmarks.harness import (
    LOOPBACK,
    ORDINARY,
    Columns,
    Findings,
    Summary,
    describe,
    ms,
    new_parser,
    number,
    page,
    run,
    run_ranks,
    span,
    table,
)
from recipes.gpt.module import GPT

READING = """\
Four steps look for NaN and infinite gradients, the next four don't, and so on. The ratio compares neighbouring fours;
shown are its median over a fit, and the least and greatest fit. Times are rank 0's; the CPU time is that of all its
threads, which other programs disturb less. Without clipping each rank reads its gradients once more, and one number is
all-reduced; with clipping the norm tells. Each block notes a sum of its output: the wider the model, the less of a step
that is.

    python -m recipes.benchmarks.nonfinite --table docs/benchmarks/nonfinite.md"""
RECIPE = Path(__file__).parents[1] / "gpt" / "wave.yaml"
WARM_UP = 4
"""the first steps of each fit, which aren't timed"""
TURN = 4
"""steps with the look before as many without: a rank that is late in one step is waited for in the next one"""
TIMEOUT_S = 600.0
Seconds = tuple[float, float]
"""of a step, on average over a turn: by the clock, and of all threads of rank 0"""
Pair = tuple[Seconds, Seconds]
"""neighbouring turns: with the look, and without"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    parser = new_parser("nonfinite", __doc__)
    number(parser, "--ranks", [1, 2], "", "P")
    number(parser, "--fits", 3, "per case")
    number(parser, "--pairs", 8, "of turns in a fit")
    number(parser, "--blocks", 8, "of the GPT")
    number(parser, "--width", 128, "of the GPT")
    number(parser, "--batch-size", 8, "sequences")
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    cases = []
    for ranks in options.ranks:
        for clip in (None, 1.0):
            fits = [_fit_on(ranks, options, clip) for _ in range(options.fits)]
            step = Summary.of([median(on for (on, _), _ in fit) for fit in fits])
            ratio, cpu = (Summary.of([_ratio(fit, clock) for fit in fits]) for clock in (0, 1))
            cases.append({"ranks": ranks, "clip": clip, "step": step, "ratio": ratio, "cpu": cpu})
    machine = describe(LOOPBACK)
    about = (
        f"The GPT recipe, {options.blocks} blocks of width {options.width}, {options.batch_size} sequences of 128 "
        f"tokens, 4 micro-batches, one wave (two on one rank), a thread per rank. {options.fits} fits of "
        f"{options.pairs} pairs of {TURN} steps per case."
    )
    text = page("# Looking for NaN and infinite gradients", machine, about, table(COLUMNS, cases), READING)
    return Findings(text, {"machine": machine, "cases": cases})


COLUMNS: Columns = (
    ("P", lambda case: str(case["ranks"])),
    ("gradient_clip_val", lambda case: str(case["clip"])),
    ("step ms", lambda case: ms(case["step"].median)),
    ("raise / ignore (fits)", lambda case: f"{case['ratio'].median:.3f} ({span(case['ratio'], 3, 1)})"),
    ("CPU time (fits)", lambda case: f"{case['cpu'].median:.3f} ({span(case['cpu'], 3, 1)})"),
)


def _ratio(fit: Sequence[Pair], clock: int) -> float:
    return float(median(on[clock] / off[clock] for on, off in fit))


def _fit_on(ranks: int, options: argparse.Namespace, clip: float | None) -> list[Pair]:
    work = partial(_fit, clip=clip, num_ranks=ranks)
    turns: list[Seconds] = run_ranks(work, vars(options), [ORDINARY] * ranks, TIMEOUT_S)[0][1]
    return list(zip(turns[::2], turns[1::2], strict=True))


def _fit(rank: int, options: dict[str, Any], *, clip: float | None, num_ranks: int) -> list[Seconds]:
    """Train on one rank; return the times of each turn."""
    times: list[Seconds] = []

    class Turns(L.Callback):
        """Looks in every second turn."""

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            session: Any = trainer.strategy.session  # type: ignore[attr-defined]
            session.values.is_watched = (len(times) - WARM_UP) // TURN % 2 == 0
            session.nonfinite.mode = "raise" if session.values.is_watched else "ignore"
            times.append((time.perf_counter(), time.process_time()))

    sizes = yaml.safe_load(RECIPE.read_text())["model"]["init_args"]
    sizes |= {"num_layers": options["blocks"], "width": options["width"]}
    steps = WARM_UP + 2 * TURN * options["pairs"] + 1
    batches = random_batches(steps, options["batch_size"], sizes["context"], sizes["vocab_size"])
    torch.manual_seed(0)
    strategy = HanayoStrategy(schedule="hanayo", num_waves=2 if num_ranks == 1 else 1, num_microbatches=4)
    fit_on_rank(rank, num_ranks, GPT(**sizes), batches, strategy=strategy, gradient_clip_val=clip, callbacks=[Turns()])
    marks = times[WARM_UP::TURN]
    between = zip(marks, marks[1:], strict=False)
    return [((end[0] - begin[0]) / TURN, (end[1] - begin[1]) / TURN) for begin, end in between]


if __name__ == "__main__":
    sys.exit(main())

"""Measures what looking for NaN and infinite gradients costs: steps with nonfinite="raise" and "ignore", in turn.

python -m recipes.benchmarks.nonfinite --table docs/benchmarks/nonfinite.md
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from recipes.benchmarks.harness import (
    LOOPBACK,
    ORDINARY,
    Findings,
    Summary,
    describe,
    new_parser,
    run,
    run_ranks,
    whole,
)

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
    parser.add_argument("--ranks", type=whole, nargs="+", default=[1, 2], metavar="P", help="(default 1 2)")
    parser.add_argument("--fits", type=whole, default=3, metavar="N", help="per case (default 3)")
    parser.add_argument("--pairs", type=whole, default=8, metavar="N", help="of turns in a fit (default 8)")
    parser.add_argument("--blocks", type=whole, default=8, metavar="N", help="of the GPT (default 8)")
    parser.add_argument("--width", type=whole, default=128, metavar="N", help="of the GPT (default 128)")
    parser.add_argument("--batch-size", type=whole, default=8, metavar="N", help="sequences (default 8)")
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, which reads it once
    from recipes.paper.table import markdown

    rows, cases = [], []
    for ranks in options.ranks:
        for clip in (None, 1.0):
            fits = [_fit_on(ranks, options, clip) for _ in range(options.fits)]
            step = Summary.of([median(on for (on, _), _ in fit) for fit in fits])
            ratio, cpu = (Summary.of([_ratio(fit, clock) for fit in fits]) for clock in (0, 1))
            figures = {"step": step, "ratio": ratio, "cpu": cpu}
            cases.append({"ranks": ranks, "clip": clip} | {name: vars(one) for name, one in figures.items()})
            shown = (f"{one.median:.3f} ({one.least:.3f}-{one.most:.3f})" for one in (ratio, cpu))
            rows.append((str(ranks), str(clip), f"{1e3 * step.median:.1f}", *shown))
    machine = describe(LOOPBACK)
    about = (
        f"The GPT recipe, {options.blocks} blocks of width {options.width}, {options.batch_size} sequences of 128 "
        f"tokens, 4 micro-batches, one wave (two on one rank), a thread per rank. {options.fits} fits of "
        f"{options.pairs} pairs of {TURN} steps per case."
    )
    table = markdown(("P", "gradient_clip_val", "step ms", "raise / ignore (fits)", "CPU time (fits)"), rows)
    listed = "\n".join(f"- {line}" for line in machine)
    text = "\n\n".join(["# Looking for NaN and infinite gradients", listed, about, table, READING]) + "\n"
    return Findings(text, {"machine": machine, "cases": cases})


def _ratio(fit: Sequence[Pair], clock: int) -> float:
    return float(median(on[clock] / off[clock] for on, off in fit))


def _fit_on(ranks: int, options: argparse.Namespace, clip: float | None) -> list[Pair]:
    found = run_ranks(partial(_fit, clip=clip), vars(options) | {"world": ranks}, [ORDINARY] * ranks, TIMEOUT_S)
    turns: list[Seconds] = found[0][1]
    return list(zip(turns[::2], turns[1::2], strict=True))


def _fit(rank: int, options: dict[str, Any], *, clip: float | None) -> list[Seconds]:
    """Train on one rank; return the times of each turn."""
    import logging
    import warnings

    import lightning as L
    import torch
    import yaml  # type: ignore[import-untyped]
    from torch.utils.data import DataLoader

    from lightning_hanayo import HanayoStrategy
    from recipes.gpt.module import GPT

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*(does not have many workers|no `val_dataloader`)")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options["world"]), "NODE_RANK": "0"}
    times: list[Seconds] = []

    class Turns(L.Callback):
        """Looks in every second turn."""

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            session: Any = trainer.strategy.session  # type: ignore[attr-defined]
            session.values.is_watched = (len(times) - WARM_UP) // TURN % 2 == 0
            session.nonfinite.mode = "raise" if session.values.is_watched else "ignore"
            times.append((time.perf_counter(), time.process_time()))

    steps = WARM_UP + 2 * TURN * options["pairs"] + 1
    arguments = yaml.safe_load(RECIPE.read_text())["model"]["init_args"]
    arguments |= {"num_layers": options["blocks"], "width": options["width"]}
    torch.manual_seed(0)
    tokens = torch.randint(arguments["vocab_size"], (steps, options["batch_size"], arguments["context"] + 1))
    batches: list[Any] = [{"input_ids": one[:, :-1], "labels": one[:, 1:]} for one in tokens]
    strategy = HanayoStrategy(num_waves=2 if options["world"] == 1 else 1, num_microbatches=4)
    trainer = L.Trainer(
        accelerator="cpu", devices=options["world"], strategy=strategy, gradient_clip_val=clip, max_epochs=1,
        callbacks=[Turns()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(GPT(**arguments), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    marks = times[WARM_UP::TURN]
    between = zip(marks, marks[1:], strict=False)
    return [((end[0] - begin[0]) / TURN, (end[1] - begin[1]) / TURN) for begin, end in between]


if __name__ == "__main__":
    sys.exit(main())

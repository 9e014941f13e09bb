"""Compares a step of the GPT recipe in one process under our strategy with the plain Trainer's.

python -m recipes.benchmarks.single --steps 20 --table single.md

plain    step 0          step 1          step 2          the same model and the same batches
ours             step 0          step 1          ...
"""

import argparse
import gc
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import lightning as L
import torch
import yaml  # type: ignore[import-untyped]

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import HanayoError
from recipes.benchmarks.fits import SteppedFit, new_trainer, random_batches, timed
from recipes.benchmarks.harness import (
    Columns,
    Findings,
    Summary,
    describe,
    keep_memory,
    ms,
    new_parser,
    number,
    page,
    run,
    table,
)
from recipes.gpt.module import GPT

RECIPE = Path(__file__).parents[1] / "gpt" / "wave.yaml"
WARM_UP = 5
"""the first steps of each fit, which aren't timed"""
TITLE = "# One process: our strategy and the plain Trainer"
READING = """\
`Trainer(strategy="hanayo")` on one device runs a single stage: the step runs straight through, without threads,
recorded calls or messages. What is left is a constant overhead: gradients are computed within the training step and
returned by Lightning's backward, logs are kept until the batch is complete, and each action's time is recorded.

Both fits train in one process, one step of each in turn, so that other programs disturb both alike. The ratio compares
neighbouring steps; shown are its median over a round, and the least and greatest round. glibc is set to keep freed
memory: otherwise it returns pages in some fits and faults them in again, which changes a step by about 2 %.

    python -m recipes.benchmarks.single --table docs/benchmarks/single.md"""
PRECISIONS = ("32-true", "bf16-mixed")


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


COLUMNS: Columns = (
    ("precision", lambda one: one.precision),
    ("plain ms", lambda one: ms(one.plain_step.median, 2)),
    ("ours ms", lambda one: ms(one.our_step.median, 2)),
    ("ours / plain", lambda one: f"{one.ratio.median:.3f}"),
    ("min-max", lambda one: f"{one.ratio.least:.3f}-{one.ratio.most:.3f}"),
    ("CPU, ours / plain", lambda one: f"{one.cpu_ratio.median:.3f}"),
    ("losses and weights", lambda one: "bit for bit equal" if one.equal else "DIFFERENT"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    parser = new_parser("single", __doc__)
    number(parser, "--rounds", 7, "pairs of fits")
    number(parser, "--steps", 20, "timed steps per fit")
    number(parser, "--batch-size", 8, "sequences")
    number(parser, "--blocks", 8, "of the GPT, as in the recipe")
    parser.add_argument("--precision", nargs="+", default=[PRECISIONS[0]], choices=PRECISIONS, help="(default 32-true)")
    parser.add_argument("--accelerator", default="cpu", help="as the Trainer takes it (default cpu)")
    number(parser, "--threads", 1, "of torch")
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    torch.set_num_threads(options.threads)
    keep_memory()
    outcomes = [_compare(options, precision) for precision in options.precision]
    is_cpu = options.accelerator == "cpu" or not torch.cuda.is_available()
    device = "cpu" if is_cpu else torch.cuda.get_device_name()
    machine = describe(f"{device}, threads: {torch.get_num_threads()}")
    about = (
        f"The GPT recipe, {options.blocks} blocks, {options.batch_size} sequences of 128 tokens, one process, one "
        f"micro-batch. {options.rounds} rounds of {options.steps} steps each way; a step is from batch to batch, "
        "medians."
    )
    data = {"machine": machine, "cases": outcomes}
    return Findings(page(TITLE, machine, about, table(COLUMNS, outcomes), READING), data)


@dataclass(frozen=True)
class _Fit:
    steps: list[float]
    cpu: list[float]
    kept: list[torch.Tensor]
    """losses and weights"""


def _compare(options: argparse.Namespace, precision: str) -> FitComparison:
    pairs = [_pair(options, precision, ours_first=bool(turn % 2)) for turn in range(options.rounds)]
    first = pairs[0][0].kept
    return FitComparison(
        precision,
        Summary.of([median(plain.steps) for plain, _ in pairs]),
        Summary.of([median(ours.steps) for _, ours in pairs]),
        Summary.of([median(map(truediv, ours.steps, plain.steps)) for plain, ours in pairs]),
        Summary.of([median(map(truediv, ours.cpu, plain.cpu)) for plain, ours in pairs]),
        equal=all(
            len(fit.kept) == len(first) and all(map(torch.equal, fit.kept, first)) for pair in pairs for fit in pair
        ),
    )


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # a step has ended when its kernels have


def _pair(options: argparse.Namespace, precision: str, *, ours_first: bool) -> list[_Fit]:
    """Run the plain fit and ours, alternating."""
    gc.collect()
    recipe = yaml.safe_load(RECIPE.read_text())
    sizes = recipe["model"]["init_args"] | {"num_layers": options.blocks}
    batches = random_batches(WARM_UP + options.steps + 1, options.batch_size, sizes["context"], sizes["vocab_size"])

    def make(strategy: Any) -> tuple[L.LightningModule, L.Trainer]:
        torch.manual_seed(recipe["seed_everything"])
        try:
            trainer = new_trainer(accelerator=options.accelerator, devices=1, strategy=strategy, precision=precision,
                                  gradient_clip_val=recipe["trainer"]["gradient_clip_val"])  # fmt: skip
        except (ValueError, L.fabric.utilities.exceptions.MisconfigurationException) as error:
            raise HanayoError(f"accelerator={options.accelerator!r}: {error}") from error
        return GPT(**sizes), trainer

    steps = [[batch] for batch in batches]
    fits = [
        SteppedFit(partial(make, strategy), steps, name)
        for name, strategy in (("plain", "auto"), ("ours", HanayoStrategy(num_microbatches=1)))
    ]
    times: list[list[tuple[float, float]]] = [[], []]
    for turn in range(-WARM_UP, options.steps):
        for place in (1, 0) if ours_first else (0, 1):
            taken = timed(fits[place], 1, _synchronize)
            if turn >= 0:
                times[place].append(taken)
    found = []
    for fit, taken_by_fit in zip(fits, times, strict=True):
        fit.close()
        assert fit.module is not None
        clock, cpu = (list(values) for values in zip(*taken_by_fit, strict=True))
        weights = [parameter.detach().cpu() for parameter in fit.module.parameters()]
        found.append(_Fit(clock, cpu, [loss.cpu() for loss in fit.losses] + weights))
    return found


if __name__ == "__main__":
    sys.exit(main())

"""Compares a step of the GPT recipe in one process under our strategy with the plain Trainer's.

python -m recipes.benchmarks.single --steps 20 --table single.md
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recipes.benchmarks.harness import Findings, describe, new_parser, run, whole

if TYPE_CHECKING:
    from recipes.benchmarks.alternating import FitComparison

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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    return run(_measure, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("single", __doc__)
    parser.add_argument("--rounds", type=whole, default=7, metavar="N", help="pairs of fits (default 7)")
    parser.add_argument("--steps", type=whole, default=20, metavar="N", help="timed steps per fit (default 20)")
    parser.add_argument("--batch-size", type=whole, default=8, metavar="N", help="sequences (default 8)")
    parser.add_argument("--blocks", type=whole, default=8, metavar="N", help="of the GPT (default 8, as in the recipe)")
    parser.add_argument("--precision", nargs="+", default=[PRECISIONS[0]], choices=PRECISIONS, help="(default 32-true)")
    parser.add_argument("--accelerator", default="cpu", help="as the Trainer takes it (default cpu)")
    parser.add_argument("--threads", type=whole, default=1, metavar="N", help="of torch (default 1)")
    return parser


def _measure(options: argparse.Namespace) -> Findings:
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is imported, which reads it once
    from recipes.benchmarks import alternating

    plan = alternating.FitPlan(options.rounds, options.steps, options.batch_size, options.blocks, options.accelerator)
    outcomes = [alternating.measure(plan, precision) for precision in options.precision]
    machine = describe(_device(options.accelerator))
    data = {"machine": machine, "cases": [outcome.plain() for outcome in outcomes]}
    return Findings(_table(plan, outcomes, machine), data)


def _device(accelerator: str) -> str:
    import torch

    device = "cpu" if accelerator == "cpu" or not torch.cuda.is_available() else torch.cuda.get_device_name()
    return f"{device}, threads: {torch.get_num_threads()}"


def _table(plan: Any, outcomes: "Sequence[FitComparison]", machine: Sequence[str]) -> str:
    from recipes.paper.table import markdown

    head = ("precision", "plain ms", "ours ms", "ours / plain", "min-max", "CPU, ours / plain", "losses and weights")
    about = (
        f"The GPT recipe, {plan.blocks} blocks, {plan.batch_size} sequences of 128 tokens, one process, one "
        f"micro-batch. {plan.rounds} rounds of {plan.steps} steps each way; a step is from batch to batch, medians."
    )
    listed = "\n".join(f"- {line}" for line in machine)
    return "\n\n".join([TITLE, listed, about, markdown(head, map(_row, outcomes)), READING]) + "\n"


def _row(outcome: "FitComparison") -> tuple[str, ...]:
    return (
        outcome.precision,
        f"{1e3 * outcome.plain_step.median:.2f}",
        f"{1e3 * outcome.our_step.median:.2f}",
        f"{outcome.ratio.median:.3f}",
        f"{outcome.ratio.least:.3f}-{outcome.ratio.most:.3f}",
        f"{outcome.cpu_ratio.median:.3f}",
        "bit for bit equal" if outcome.equal else "DIFFERENT",
    )


if __name__ == "__main__":
    sys.exit(main())

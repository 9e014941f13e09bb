"""The single-process benchmark: a step of the GPT recipe under our strategy, beside the plain Trainer's.

python -m recipes.benchmarks.single --steps 20 --table single.md
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hanayo.errors import HanayoError

if TYPE_CHECKING:
    from recipes.benchmarks.turns import Outcome

TITLE = "# One process: our strategy beside the plain Trainer"
READING = """\
`Trainer(strategy="hanayo")` on one device plays one stage: the step runs straight through, without threads, recorded
calls or messages. What is left is bookkeeping of a fixed length: gradients are made within the training step and handed
to Lightning's backward, logs are kept until the batch is whole, each action is noted.

Both train in one process, a step of one and a step of the other, so that what else runs on the machine meets both
alike. The ratio is that of neighbouring steps, its median over a round; min-max are the rounds'. glibc is told to keep
freed memory: whether it gives pages back and faults them in again changes from fit to fit, and is some 2 % of a step.

    python -m recipes.benchmarks.single --table docs/benchmarks/single.md"""
PRECISIONS = ("32-true", "bf16-mixed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for. Returns the exit code."""
    options = _parser().parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)  # before torch is imported, which reads it once
    from recipes.benchmarks import turns

    plan = turns.Plan(options.rounds, options.steps, options.batch_size, options.blocks, options.accelerator)
    try:
        outcomes = [turns.measure(plan, precision) for precision in options.precision]
    except HanayoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = _describe(options)
    text = _table(plan, outcomes, machine)
    print(text)
    if options.json:
        data = {"machine": machine, "cases": [outcome.plain() for outcome in outcomes]}
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.table:
        options.table.write_text(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.single", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--rounds", type=_size, default=7, metavar="N", help="pairs of fits (default 7)")
    parser.add_argument("--steps", type=_size, default=20, metavar="N", help="timed in each (default 20)")
    parser.add_argument("--batch-size", type=_size, default=8, metavar="N", help="sequences (default 8)")
    parser.add_argument("--blocks", type=_size, default=8, metavar="N", help="of the GPT (default 8, as the recipe)")
    parser.add_argument("--precision", nargs="+", default=[PRECISIONS[0]], choices=PRECISIONS, help="(default 32-true)")
    parser.add_argument("--accelerator", default="cpu", help="as the Trainer takes it (default cpu)")
    parser.add_argument("--threads", type=_size, default=1, metavar="N", help="of torch (default 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="write the table that is printed")
    return parser


def _size(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value


def _describe(options: argparse.Namespace) -> list[str]:
    import torch

    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    device = "cpu" if options.accelerator == "cpu" or not torch.cuda.is_available() else torch.cuda.get_device_name()
    return [
        f"{time.strftime('%Y-%m-%d %H:%M')}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        f"torch {torch.__version__}, Python {platform.python_version()}; {device}, threads: {torch.get_num_threads()}",
        f"load average at the end {load}",
    ]


def _table(plan: Any, outcomes: "Sequence[Outcome]", machine: Sequence[str]) -> str:
    from recipes.paper.table import markdown

    head = ("precision", "plain ms", "ours ms", "ours / plain", "min-max", "CPU, ours / plain", "losses and weights")
    about = (
        f"The GPT recipe, {plan.blocks} blocks, {plan.batch_size} sequences of 128 tokens, one process, one "
        f"micro-batch. {plan.rounds} rounds of {plan.steps} steps each way; a step is from batch to batch, medians."
    )
    listed = "\n".join(f"- {line}" for line in machine)
    return "\n\n".join([TITLE, listed, about, markdown(head, map(_row, outcomes)), READING]) + "\n"


def _row(outcome: "Outcome") -> tuple[str, ...]:
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

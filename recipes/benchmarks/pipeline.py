"""The pipeline benchmark: our runtime beside torch.distributed.pipelining's, on emulated devices or for real.

python -m recipes.benchmarks.pipeline --ranks 4 --microbatches 4 8 --waves 2
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_hanayo.errors import HanayoError

if TYPE_CHECKING:
    from recipes.benchmarks.rounds import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for. Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        text, data, picture = _real(options) if options.real else _emulated(options)
    except HanayoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return 130
    print(text)
    if options.json:
        options.json.write_text(json.dumps(data, indent=1) + "\n")
    if options.table:
        options.table.write_text(text)
    if options.picture:
        picture(options.picture)
    return 0


def _parser() -> argparse.ArgumentParser:
    from recipes.benchmarks.names import NAMES

    parser = argparse.ArgumentParser(prog="python -m recipes.benchmarks.pipeline", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    many: dict[str, Any] = {"nargs": "+", "metavar": "N"}
    parser.add_argument("--ranks", type=whole, default=[4], help="P; several make several cases (default 4)", **many)
    parser.add_argument("--microbatches", type=whole, default=[4], help="B (default 4)", **many)
    parser.add_argument(
        "--waves", type=whole, default=[2], help="W; interleaved ones get 2W stages (default 2)", **many
    )
    parser.add_argument("--forward-ms", type=numeric, default=20.0, metavar="MS",
                        help="one micro-batch's forward through a rank's whole share; 0: no compute at all "
                        "(default 20)")  # fmt: skip
    parser.add_argument("--backward", type=numeric, nargs=2, default=[1.0, 1.0], metavar=("I", "W"),
                        help="input and weight gradient, in forwards (default 1 1)")  # fmt: skip
    parser.add_argument("--message-bytes", type=whole, default=[4096], help="(default 4096)", **many)
    parser.add_argument("--hop-ms", type=numeric, default=0.5, metavar="MS",
                        help="time of a message that hanayo-zb's order counts on (default 0.5)")  # fmt: skip
    parser.add_argument("--schedules", nargs="+", default=list(NAMES), metavar="NAME",
                        help=f"of {', '.join(NAMES)} (default: all)")  # fmt: skip
    parser.add_argument("--rounds", type=whole, default=7, metavar="N", help="each candidate once in each (default 7)")
    parser.add_argument("--steps", type=whole, default=1, metavar="N", help="back to back, no barrier (default 1)")
    parser.add_argument("--ordinary", action="store_true", help="don't ask for real-time priority")
    parser.add_argument("--real", action="store_true", help="real computation instead: transformer blocks, 2 ranks, "
                        "a core each; see the README")  # fmt: skip
    parser.add_argument("--width", type=whole, default=256, help="--real: features per token (default 256)")
    parser.add_argument("--blocks", type=whole, default=4, help="--real: blocks per rank, a multiple of 4 (default 4)")
    parser.add_argument("--samples", type=whole, default=4, help="--real: sequences of 128 tokens (default 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    parser.add_argument("--table", type=Path, metavar="FILE.md", help="write the table that is printed")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw bars, measured beside ideal")
    return parser


def whole(text: str) -> int:
    """An argument that is a whole number, at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value


def numeric(text: str) -> float:
    """An argument that is a number, at least 0."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 0")
    return value


def _emulated(options: argparse.Namespace) -> tuple[str, Any, Any]:
    from recipes.benchmarks import crew, report
    from recipes.benchmarks.case import Case, candidates
    from recipes.benchmarks.machine import Manners
    from recipes.benchmarks.result import outcome_of
    from recipes.benchmarks.rounds import Plan, play_all

    playing = tuple(candidates(options.schedules, options.waves))
    forward, (inputs, weights) = options.forward_ms / 1e3, options.backward
    outcomes, said = [], ""
    for ranks in options.ranks:
        if ranks < 2:
            raise HanayoError(f"--ranks {ranks}: a pipeline has at least 2")
        cases = tuple(
            Case(ranks, count, forward, inputs * forward, weights * forward, size, options.steps, options.hop_ms / 1e3)
            for count, size in product(options.microbatches, options.message_bytes)
        )
        plan = Plan(cases, playing, options.rounds)
        found = crew.run(ranks, play_all, plan, [Manners(not options.ordinary)] * ranks, timeout=_patience(plan))
        said = found[0][0]
        outcomes += [outcome_of(case, records) for case, *records in zip(cases, *(r for _, r in found), strict=True)]
    machine = describe(said)
    data = {"machine": machine, "cases": [outcome.plain() for outcome in outcomes]}
    return report.table(outcomes, machine), data, lambda path: report.draw(outcomes, path)


def _patience(plan: "Plan") -> float:
    """Seconds until something must be wrong: ten times what the plan should take."""
    plays = (plan.num_rounds + 3) * len(plan.candidates)
    return 120.0 + 10 * sum(plays * case.steps * (4 * case.busy + 0.1) for case in plan.cases)


def _real(options: argparse.Namespace) -> tuple[str, Any, Any]:
    from recipes.benchmarks import real

    outcome = real.measure(options.microbatches, options.width, options.blocks, options.samples, options.rounds)
    machine = describe(outcome.manners)
    data = {"machine": machine, "real": outcome.plain()}
    return real.table(outcome, machine), data, lambda path: real.draw(outcome, path)


def describe(manners: str) -> list[str]:
    """The machine, and how busy others kept it."""
    import torch

    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return [
        f"{time.strftime('%Y-%m-%d %H:%M')}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        f"torch {torch.__version__}, Python {platform.python_version()}, gloo over loopback, processes on one machine",
        f"{manners}; load average at the end {load}",
    ]


if __name__ == "__main__":
    sys.exit(main())

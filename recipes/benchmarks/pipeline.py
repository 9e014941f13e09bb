"""Compares our pipeline runtime with torch.distributed.pipelining's, on emulated devices or with real computation.

python -m recipes.benchmarks.pipeline --ranks 4 --microbatches 4 8 --waves 2
"""

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from lightning_hanayo.errors import HanayoError
from recipes.benchmarks.harness import LOOPBACK, Findings, describe, new_parser, number, numeric, run, run_ranks

if TYPE_CHECKING:
    from recipes.benchmarks.rounds import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    from recipes.benchmarks.case import NAMES

    parser = new_parser("pipeline", __doc__, picture="draw bars, measured and ideal")
    number(parser, "--ranks", [4], "P, a case for each")
    number(parser, "--microbatches", [4], "B")
    number(parser, "--waves", [2], "W; interleaved schedules get 2W stages per rank")
    number(parser, "--forward-ms", 20.0, "one micro-batch's forward through a rank's whole share; 0: no compute at all",
           "MS")  # fmt: skip
    parser.add_argument("--backward", type=numeric, nargs=2, default=[1.0, 1.0], metavar=("I", "W"),
                        help="input and weight gradient, in forwards (default 1 1)")  # fmt: skip
    number(parser, "--message-bytes", [4096], "")
    parser.add_argument("--hop-ms", type=numeric, metavar="MS",
                        help="message time for which hanayo-zb chooses its order (default: as measured before each "
                        "case, with messages of its size)")  # fmt: skip
    parser.add_argument("--schedules", nargs="+", default=list(NAMES), metavar="NAME",
                        help=f"of {', '.join(NAMES)} (default: all)")  # fmt: skip
    number(parser, "--rounds", 7, "runs of each candidate")
    number(parser, "--steps", 1, "in a row, without a barrier")
    parser.add_argument("--ordinary", action="store_true", help="don't ask for real-time priority")
    parser.add_argument("--real", action="store_true", help="real computation instead: transformer blocks, 2 ranks, "
                        "a core each; see the README")  # fmt: skip
    number(parser, "--width", 256, "--real: features per token")
    number(parser, "--blocks", 4, "--real: blocks per rank, a multiple of 4")
    number(parser, "--samples", 4, "--real: sequences of 128 tokens")
    options = parser.parse_args(arguments)
    return run(_real if options.real else _emulated, options)


def _emulated(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks import report
    from recipes.benchmarks.case import Case, candidates
    from recipes.benchmarks.harness import ProcessOptions
    from recipes.benchmarks.report import outcome_of
    from recipes.benchmarks.rounds import Plan, run_all

    chosen = tuple(candidates(options.schedules, options.waves))
    forward, (inputs, weights) = options.forward_ms / 1e3, options.backward
    outcomes, priority = [], ""
    hop = None if options.hop_ms is None else options.hop_ms / 1e3
    for ranks in options.ranks:
        if ranks < 2:
            raise HanayoError(f"--ranks {ranks}: a pipeline has at least 2")
        cases = tuple(
            Case(ranks, count, forward, inputs * forward, weights * forward, size, options.steps, hop)
            for count, size in product(options.microbatches, options.message_bytes)
        )
        plan = Plan(cases, chosen, options.rounds)
        found = run_ranks(run_all, plan, [ProcessOptions(not options.ordinary)] * ranks, timeout=_timeout(plan))
        priority = found[0][0]
        outcomes += [outcome_of(case, records) for case, *records in zip(cases, *(r for _, r in found), strict=True)]
    return report.findings(outcomes, describe(LOOPBACK, priority))


def _timeout(plan: "Plan") -> float:
    """The time limit in seconds: ten times what the plan should take."""
    num_runs = (plan.num_rounds + 3) * len(plan.candidates)
    return 120.0 + 10 * sum(num_runs * case.steps * (4 * case.busy + 0.1) for case in plan.cases)


def _real(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks import real

    outcome = real.measure(options.microbatches, options.width, options.blocks, options.samples, options.rounds)
    return real.findings(outcome, describe(LOOPBACK, outcome.priority))


if __name__ == "__main__":
    sys.exit(main())

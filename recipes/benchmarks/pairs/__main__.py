"""The benchmark of pairs: a rank works on two micro-batches at once, on a cluster of emulated hosts.

python -m recipes.benchmarks.pairs --table docs/benchmarks/pairs-tables.md --json docs/benchmarks/pairs.json
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import TYPE_CHECKING

from recipes.benchmarks.cluster import Cluster, Link
from recipes.benchmarks.harness import Findings, describe, new_parser, number, run_on_cluster

if TYPE_CHECKING:
    from recipes.benchmarks.pairs.rank import Plan
    from recipes.benchmarks.pairs.report import Outcome

TIMEOUT_S = 3000.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for. Returns the exit code: 3 where there can be no cluster."""
    parser = new_parser("pairs", __doc__, picture="draw steps, one by one and in pairs")
    number(parser, "--rounds", 2, "each step once in each")
    number(parser, "--mbit", 200.0, "of each link")
    number(parser, "--hidden", 384, "of the layers")
    number(parser, "--tokens", [8, 2], "of a micro-batch, in multiples of the hidden size")
    number(parser, "--microbatches", [2, 4, 8], "of a step, even numbers")
    return run_on_cluster(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks.pairs import report
    from recipes.benchmarks.pairs.cases import HOSTS, plan_of
    from recipes.benchmarks.pairs.pipes import pipes_of, results_of, work_pipes

    link, begin = Link(options.mbit), time.monotonic()
    plans = [
        plan_of(link, options.hidden, multiple, options.microbatches, options.rounds) for multiple in options.tokens
    ]
    outcomes = [_outcome(plan, link) for plan in plans]
    pipes = pipes_of(link, options.hidden)
    print("pipelines of cubes", file=sys.stderr)
    with Cluster(HOSTS, link) as cluster:
        pipelines = results_of(pipes, cluster.run(work_pipes, pipes, TIMEOUT_S), link)
    context = f"gloo, {HOSTS} network namespaces, {link.mbit:g} Mbit/s each way (tbf, burst {link.burst_kb} KB)"
    about = describe(context, f"{time.monotonic() - begin:.0f} s in all, {options.rounds} rounds")
    far = report.far_ahead(link)
    data = {
        "about": about,
        "cases": [asdict(one) for one in outcomes],
        "pipelines": [asdict(one) for one in pipelines],
        "far ahead": [asdict(one) for one in far],
    }
    text = "\n".join(
        [report.table(outcomes, about), *report.pipeline_table(pipelines), "", *report.forecast_table(far), ""]
    )
    return Findings(text, data, {"picture": lambda path: report.draw(outcomes, path)})


def _outcome(plan: "Plan", link: Link) -> "Outcome":
    """Run each scheme in processes of its own, whose memory and threads no other scheme has used."""
    from recipes.benchmarks.pairs import report
    from recipes.benchmarks.pairs.cases import HOSTS
    from recipes.benchmarks.pairs.rank import work

    results: list[report.Result] = []
    for scheme, runs in groupby(plan.runs, key=lambda run: run.scheme):
        part = replace(plan, runs=tuple(runs))
        print(f"{plan.case.title}: {scheme}, after {len(results)} of {len(plan.runs)} rows", file=sys.stderr)
        with Cluster(HOSTS, link) as cluster:
            results += report.results_of(part, link, cluster.run(work, part, TIMEOUT_S))
    return report.Outcome(plan.case.title, plan.case.hidden, tuple(results))


if __name__ == "__main__":
    sys.exit(main())

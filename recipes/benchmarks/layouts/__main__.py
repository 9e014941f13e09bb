"""The layout benchmark: many layouts of one model on eight emulated hosts, against the planner's predictions.

python -m recipes.benchmarks.layouts --table docs/benchmarks/layouts-tables.md --json docs/benchmarks/layouts.json \
    --picture docs/benchmarks/layouts.png
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.benchmarks.cluster import Cluster, Link
from recipes.benchmarks.harness import Findings, describe, new_parser, number, read, run, run_on_cluster, stored, whole

if TYPE_CHECKING:
    from recipes.benchmarks.layouts.rank import Plan, Record

TIMEOUT_S = 1200.0
CHECK_HIDDEN, CHECK_SEQ = 16, 8


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for. Returns the exit code: 3 where there can be no cluster."""
    parser = new_parser("layouts", __doc__, picture="draw predicted steps over measured ones")
    number(parser, "--mbit", 200.0, "each host's bandwidth, each way, in megabits per second")
    number(parser, "--rounds", 3, "each layout once in each")
    number(parser, "--gflops", 6.0, "of a host, per second")
    parser.add_argument("--some", type=whole, nargs="+", metavar="N", help="some of the layouts, numbered from 1")
    parser.add_argument("--no-paper", action="store_true", help="leave the paper's comparison out")
    parser.add_argument("--from", type=Path, dest="measured", metavar="FILE.json",
                        help="instead: the table and the picture of an earlier run with the same options")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="instead: compute small layers for real, and compare")
    options = parser.parse_args(arguments)
    if options.measured is not None:
        return run(_again, options)
    return run_on_cluster(_check if options.check else _measure, options)


def _chosen(options: argparse.Namespace, samples: int) -> tuple[Any, ...]:
    """The layouts that are run: those asked for, and always the one of Megatron's rule, with which others compare."""
    from recipes.benchmarks.layouts.cases import is_megatron, layouts

    numbered = enumerate(layouts(samples), 1)
    return tuple(one for number, one in numbered if not options.some or number in options.some or is_megatron(one))


def _check(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks.layouts.cases import HOSTS, Model
    from recipes.benchmarks.layouts.rank import Plan, check

    model = Model(hidden=CHECK_HIDDEN, seq=CHECK_SEQ)
    plan = Plan(model, _chosen(options, model.samples), 1)
    with Cluster(HOSTS, Link(10 * options.mbit)) as cluster:
        found = cluster.run(check, plan, TIMEOUT_S)
    errors = {f"{one}, {one.schedule}": max(host[place] for host in found) for place, one in enumerate(plan.layouts)}
    text = "\n".join(f"{name:56} {error:.1e}" for name, error in errors.items())
    return Findings(text, errors, code=0 if max(errors.values()) < 1e-10 else 1)


def _plan(options: argparse.Namespace) -> "Plan":
    from recipes.benchmarks.layouts.cases import Model
    from recipes.benchmarks.layouts.rank import Plan

    model = Model(flops_per_second=1e9 * options.gflops)
    return Plan(model, _chosen(options, model.samples), options.rounds, () if options.no_paper else (8, 4))


def _measure(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks.layouts.cases import HOSTS
    from recipes.benchmarks.layouts.rank import work

    link, plan = Link(options.mbit), _plan(options)
    begin = time.monotonic()
    with Cluster(HOSTS, link) as cluster:
        records = cluster.run(work, plan, TIMEOUT_S)
    context = f"gloo, {HOSTS} network namespaces, {link.mbit:g} Mbit/s each way (tbf, burst {link.burst_kb} KB)"
    return _findings(plan, records, describe(context, f"{time.monotonic() - begin:.0f} s in all, {plan.rounds} rounds"))


def _again(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks.layouts.rank import Record

    def found(data: Any) -> Findings:
        return _findings(_plan(options), [read(Record, one) for one in data["records"]], data["about"])

    return stored(options.measured, found)


def _findings(plan: "Plan", records: Sequence["Record"], about: list[str]) -> Findings:
    from recipes.benchmarks.layouts import report

    outcome = report.outcome_of(plan, records)
    data = {"about": about} | outcome.plain() | {"records": [asdict(record) for record in records]}
    return Findings(report.text(outcome, about, plan.model), data, {"picture": lambda path: report.draw(outcome, path)})


if __name__ == "__main__":
    sys.exit(main())

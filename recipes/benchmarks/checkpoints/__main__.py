"""Measures checkpoints: ours, torch's distributed checkpoint, and one file through rank 0.

python -m recipes.benchmarks.checkpoints --ranks 2 4 --json checkpoints.json --table checkpoints.md
python -m recipes.benchmarks.checkpoints --gigabytes 0.1 --folder /dev/shm --rounds 1
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.benchmarks.harness import (
    LOOPBACK,
    ORDINARY,
    Findings,
    describe,
    new_parser,
    number,
    read,
    run,
    run_ranks,
    stored,
)

if TYPE_CHECKING:
    from recipes.benchmarks.checkpoints.report import CaseFigures

SECONDS_PER_GIGABYTE = 60
"""the longest that a save with its loads may take"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the requested files. Returns the exit code."""
    parser = new_parser("checkpoints", __doc__, picture="draw saving, loading and memory")
    number(parser, "--ranks", [2, 4], "")
    number(parser, "--gigabytes", 2.0, "all ranks' weights and Adam states together", "GB")
    number(parser, "--rounds", 3, "all ways in each")
    number(parser, "--products", 8, "products of 1024 x 1024 matrices in a step")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where checkpoints are written for a moment "
                        "(default: a temporary folder)")  # fmt: skip
    parser.add_argument("--again", type=Path, metavar="FILE.json", help="measure nothing: format the figures in it")
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks.checkpoints import report

    def again(data: Any) -> tuple[list[str], list[report.CaseFigures]]:
        return data["machine"], [read(report.CaseFigures, case) for case in data["cases"]]

    machine, cases = stored(options.again, again) if options.again else _run(options)
    data = {"machine": machine, "cases": [asdict(case) for case in cases]}
    return Findings(report.text(cases, machine), data, {"picture": lambda path: report.draw(cases, path)})


def _run(options: argparse.Namespace) -> tuple[list[str], list["CaseFigures"]]:
    from recipes.benchmarks.checkpoints.rank import NAMES, Plan, run_all
    from recipes.benchmarks.checkpoints.report import CaseFigures
    from recipes.benchmarks.checkpoints.ways import Sizes

    cases = []
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=options.folder) as folder:
        plan = Plan(Sizes.of_bytes(1e9 * options.gigabytes), Path(folder), options.rounds, options.products)
        limit = 120 + SECONDS_PER_GIGABYTE * options.gigabytes * options.rounds * len(NAMES)
        for count in options.ranks:
            found = run_ranks(run_all, plan, [ORDINARY] * count, limit)
            cases.append(CaseFigures.combined([record for _, record in found]))
    where = f"checkpoints in {options.folder or 'a temporary folder'}"
    return describe(LOOPBACK, f"width {plan.sizes.width}, {options.rounds} rounds, {where}"), cases


if __name__ == "__main__":
    sys.exit(main())

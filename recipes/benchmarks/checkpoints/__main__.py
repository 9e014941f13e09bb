"""Measures checkpoints: ours, torch's distributed checkpoint, and one file through rank 0.

python -m recipes.benchmarks.checkpoints --ranks 2 4 --json checkpoints.json --table checkpoints.md
python -m recipes.benchmarks.checkpoints --gigabytes 0.1 --folder /dev/shm --rounds 1
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hanayo.errors import HanayoError
from recipes.benchmarks.harness import (
    LOOPBACK,
    ORDINARY,
    Findings,
    describe,
    new_parser,
    numeric,
    run,
    run_ranks,
    whole,
)

if TYPE_CHECKING:
    from recipes.benchmarks.checkpoints.figures import CaseFigures

SECONDS_PER_GIGABYTE = 60
"""the longest that a save with its loads may take"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the requested files. Returns the exit code."""
    return run(_measure, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("checkpoints", __doc__, picture="draw saving, loading and memory")
    parser.add_argument("--ranks", type=whole, nargs="+", default=[2, 4], metavar="N", help="(default 2 4)")
    parser.add_argument("--gigabytes", type=numeric, default=2.0, metavar="GB",
                        help="all ranks' weights and Adam states together (default 2)")  # fmt: skip
    parser.add_argument("--rounds", type=whole, default=3, metavar="N", help="all ways in each (default 3)")
    parser.add_argument("--products", type=whole, default=8, metavar="N",
                        help="products of 1024 x 1024 matrices in a step (default 8)")  # fmt: skip
    parser.add_argument("--folder", type=Path, metavar="DIR", help="where checkpoints are written for a moment "
                        "(default: a temporary folder)")  # fmt: skip
    parser.add_argument("--again", type=Path, metavar="FILE.json", help="measure nothing: format the figures in it")
    return parser


def _measure(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks.checkpoints import report

    machine, cases = _again(options.again) if options.again else _run(options)
    data = {"machine": machine, "cases": [case.plain() for case in cases]}
    return Findings(report.table(cases, machine), data, {"picture": lambda path: report.draw(cases, path)})


def _again(path: Path) -> tuple[list[str], list["CaseFigures"]]:
    from recipes.benchmarks.checkpoints.figures import CaseFigures

    try:
        data = json.loads(path.read_text())
        return data["machine"], [CaseFigures.of(case) for case in data["cases"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HanayoError(f"{path}: expected what --json of this command writes; {error!r}") from error


def _run(options: argparse.Namespace) -> tuple[list[str], list["CaseFigures"]]:
    from recipes.benchmarks.checkpoints.figures import CaseFigures
    from recipes.benchmarks.checkpoints.rank import NAMES, Plan, run_all
    from recipes.benchmarks.checkpoints.state import Sizes

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

"""The battery:  python -m tests.faults.battery [-k WORDS] [--json FILE] [--rest] [--jobs N] [--peers] [--list]

Injects faults into launched trainings, and prints how many were detected and named, how many runs ended cleanly, and
how many lost a checkpoint. The whole battery took 20 minutes on four busy cores, at three runs at a time.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.faults.battery.cases import Case, ours, peers
from tests.faults.battery.page import page
from tests.faults.battery.runner import Result, read, run_all, write
from tests.faults.battery.table import COLUMNS, Row, row, rows, strategy_of


def main() -> int:
    """Run the chosen cases; return 1 if a fault of ours wasn't detected, named and clean, or cost a checkpoint."""
    options = _parser().parse_args()
    every = [*ours(), *(peers() if options.peers else ())]
    cases = [case for case in every if all(word in case.name for word in options.k.split())]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    results = read(options.json)
    if not options.show:
        done = {name for name, result in results.items() if not result.verdict.reasons} if options.rest else set()
        _run([case for case in cases if case.name not in done], options, results)
    chosen = [results[case.name] for case in cases if case.name in results]
    _print(Console(), chosen)
    if options.page:
        options.page.write_text(page(chosen, json.loads(options.json.read_text())["about"]))
    own = row("", (result for result in chosen if strategy_of(result) == "hanayo"))
    return 0 if own.is_as_wanted else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.battery", description=__doc__)
    parser.add_argument("-k", default="", help="only cases with these words in their names: '-k \"P=4 kill\"'")
    parser.add_argument("--json", type=Path, default=Path("faults.json"), help="where results are kept and replaced")
    parser.add_argument("--jobs", type=int, default=3, help="runs at a time, of four processes each")
    parser.add_argument("--peers", action="store_true", help="also Lightning's DDPStrategy and ModelParallelStrategy")
    parser.add_argument("--rest", action="store_true", help="only cases that the file has no good result of")
    parser.add_argument("--show", action="store_true", help="print the tables of the file, and run nothing")
    parser.add_argument("--page", type=Path, help="write the tables and all that isn't as wanted into this file")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    return parser


def _run(cases: list[Case], options: argparse.Namespace, results: dict[str, Result]) -> None:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    start = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    about = {"machine": platform.processor() or platform.machine(), "python": platform.python_version(), "date": start}
    with Progress(*columns) as progress:
        task = progress.add_task("faults", total=len(cases))

        def seen(result: Result) -> None:
            results[result.case.name] = result
            write(options.json, results, about)
            progress.advance(task)
            progress.console.print(_line(result), markup=False, highlight=False)

        run_all(cases, options.jobs, seen)


def _line(result: Result) -> str:
    verdict = result.verdict
    if not verdict.injected:
        return f"-   {result.case.name}: not reached"
    return f"{'bad' if verdict.reasons else 'ok '} {result.case.name}: {verdict.seconds} s {'; '.join(verdict.reasons)}"


def _print(console: Console, results: list[Result]) -> None:
    for strategy in dict.fromkeys(map(strategy_of, results)):
        own = [result for result in results if strategy_of(result) == strategy]
        table = Table("", *COLUMNS, title=strategy)
        for group in (rows(own, lambda result: result.case.kind), rows(own, lambda result: result.case.site)):
            _add(table, group)
        _add(table, [row("all", own)])
        console.print(table)


def _add(table: Table, found: list[Row]) -> None:
    for line in found:
        table.add_row(line.name, *map(str, line.counts), style=None if line.is_as_wanted else "red")
    table.add_section()


if __name__ == "__main__":
    sys.exit(main())

"""Runs Lightning's own tests with a strategy in place of the single CPU device, and compares such runs.

python -m tests.lightning_suite CHECKOUT/tests/tests_pytorch --strategy hanayo --microbatches 2 --json hanayo2.json
python -m tests.lightning_suite --compare stock.json ddp.json hanayo1.json hanayo2.json --page lightning-suite.md
"""

import argparse
import os
import platform
from datetime import date
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from tests.lightning_suite.comparison import Comparison, read_reasons, reason_for
from tests.lightning_suite.page import page
from tests.lightning_suite.processes import Settings, run_tests
from tests.lightning_suite.results import SuiteRun, TestResult, by_name

_GOOD = ("passed", "skipped")


def main() -> None:
    """Run what the command line asks for."""
    arguments = _parse()
    if arguments.compare:
        _compare([SuiteRun.load(path) for path in arguments.compare], arguments.page)
        return
    run = _run(arguments)
    print(f"{run.column}: {len(run.passed())} of {len(run.results)} tests passed")
    if arguments.json:
        run.save(arguments.json)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.lightning_suite", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checkout", type=Path, nargs="?", help="the folder tests/tests_pytorch of a Lightning checkout")
    parser.add_argument("--strategy", choices=["stock", "ddp", "hanayo"], default="hanayo")
    parser.add_argument("--microbatches", type=int, choices=[1, 2], default=1)
    parser.add_argument("-k", dest="select", default="", help="selects tests, as pytest's -k")
    parser.add_argument("--only", nargs="*", default=[], help="files or folders of the checkout")
    parser.add_argument("--json", type=Path, help="the file that gets the results")
    parser.add_argument("--jobs", type=int, default=2, help="how many processes run tests")
    parser.add_argument("--again", type=Path, help="results: what has failed in them is run again, the rest is kept")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a test")
    parser.add_argument("--compare", type=Path, nargs="*", help="results of the stock strategy, and of others")
    parser.add_argument("--page", type=Path, help="the file that gets the comparison")
    arguments = parser.parse_args()
    if (arguments.checkout is None) == (arguments.compare is None):
        parser.error("give the folder of Lightning's tests to run them, or --compare with results")
    return arguments


def _run(arguments: argparse.Namespace) -> SuiteRun:
    settings = Settings(
        arguments.checkout.resolve(),
        arguments.strategy,
        arguments.microbatches,
        select=arguments.select,
        only=arguments.only,
        limit=arguments.limit,
        jobs=arguments.jobs,
        done=_good(arguments.again),
    )
    results = list(settings.done)
    for result in run_tests(settings):
        results.append(result)
        _print_problem(result)
    column = f"hanayo {arguments.microbatches}" if arguments.strategy == "hanayo" else arguments.strategy
    versions = {"Lightning": version("lightning"), "torch": version("torch"), "Python": platform.python_version()}
    machine = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    return SuiteRun(column, date.today().isoformat(), machine, versions, by_name(results))


def _good(path: Path | None) -> list[TestResult]:
    """The results of an earlier run that are kept."""
    results = [] if path is None else SuiteRun.load(path).results.values()
    return [result for result in results if result.outcome in _GOOD]


def _print_problem(result: TestResult) -> None:
    if result.outcome not in _GOOD:
        first_line = (result.message.splitlines() or [""])[0]
        print(f"{result.outcome}: {result.name}: {first_line}", flush=True)


def _compare(runs: list[SuiteRun], path: Path | None) -> None:
    comparison, reasons = Comparison.of(runs), read_reasons()
    Console().print(comparison.table())
    for run in comparison.others:
        for test in comparison.lost(run):
            if run.column.startswith("hanayo") and reason_for(test, run.column, reasons) is None:
                print(f"{run.column}: no reason is known for {test}")
    if path is not None:
        path.write_text(page(comparison, reasons), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The pytest plugin that Lightning's tests are run with: puts a strategy in, and writes a line for each test.

pytest -p tests.lightning_suite.plugin --suite-strategy hanayo --suite-microbatches 2 --suite-log tests.jsonl ...
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.lightning_suite.injection import inject, skip_tests_that_start_processes
from tests.lightning_suite.results import TestResult

_KEPT_DETAILS = 4000
"""characters of a traceback"""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lightning_suite")
    group.addoption("--suite-strategy", default="stock", choices=["stock", "ddp", "hanayo"])
    group.addoption("--suite-microbatches", default=1, type=int)
    group.addoption("--suite-log", default=None, help="the file that gets a line for each test")
    group.addoption("--suite-done", default=None, help="a file with the names of tests that are not run again")


def pytest_configure(config: pytest.Config) -> None:
    runs = inject(config.getoption("--suite-strategy"), config.getoption("--suite-microbatches"))
    skip_tests_that_start_processes()
    log = config.getoption("--suite-log")
    if log is not None:
        config.pluginmanager.register(_Recorder(Path(log), runs))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = config.getoption("--suite-done")
    if done is not None:
        names = set(json.loads(Path(done).read_text()))
        items[:] = [item for item in items if item.nodeid not in names]


class _Recorder:
    """Writes what comes of each test as soon as it is known: this process may end at any moment."""

    def __init__(self, path: Path, runs: list[str]) -> None:
        self._path = path
        self._runs = runs
        self._reports: list[pytest.TestReport] = []

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._reports.clear()
        self._runs.clear()
        self._write({"name": nodeid, "outcome": "started"})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(vars(_result(nodeid, self._reports, len(self._runs))))

    def pytest_sessionfinish(self) -> None:
        self._write({"name": "", "outcome": "finished"})

    def _write(self, values: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def _result(name: str, reports: list[pytest.TestReport], engine_runs: int) -> TestResult:
    """One result of a test's set-up, call and clean-up: it has failed if one of them has."""
    seconds = sum(report.duration for report in reports)
    bad = next((report for report in reports if report.failed), None)
    if bad is not None:
        crash = getattr(bad.longrepr, "reprcrash", None)
        message = str(getattr(crash, "message", bad.longrepr))[:_KEPT_DETAILS]
        return TestResult(name, "failed", message, engine_runs, seconds, bad.longreprtext[-_KEPT_DETAILS:])
    skipped = next((report for report in reports if report.skipped), None)
    if skipped is not None:
        reason = skipped.longrepr[2] if isinstance(skipped.longrepr, tuple) else "expected to fail"
        return TestResult(name, "skipped", reason, engine_runs, seconds)
    return TestResult(name, "passed", "", engine_runs, seconds)

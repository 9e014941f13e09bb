"""Runs Lightning's tests in pytest processes, a few files in each; one that crashes or hangs is followed by another."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.lightning_suite.results import TestResult

_ROOT = Path(__file__).parents[2]
_CHUNK = 100_000
"""bytes of test files that one process runs"""
_LOOK = 0.5
"""seconds between two looks at a process"""
_TO_START = 180.0
"""seconds that a process may take, beyond a test's limit, until its log grows"""

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "HF_HUB_OFFLINE": "1",
    "http_proxy": "http://127.0.0.1:9",  # tests that download fail at once, in all columns
    "https_proxy": "http://127.0.0.1:9",
    "no_proxy": "localhost,127.0.0.1",
}


@dataclass(frozen=True)
class Settings:
    """What is run, and how."""

    checkout: Path
    """the folder `tests_pytorch`; nothing is written there"""
    strategy: str
    num_microbatches: int
    select: str = ""
    """as pytest's -k"""
    only: Sequence[str] = ()
    """files or folders in the checkout; none: all"""
    limit: int = 60
    """seconds for a test"""
    jobs: int = 2
    done: Sequence[TestResult] = ()
    """tests that aren't run"""


def run_tests(settings: Settings) -> Iterator[TestResult]:
    """Run them all. Results come chunk by chunk."""
    with ThreadPoolExecutor(settings.jobs) as executor:
        for results in executor.map(lambda files: _Chunk(settings, files).run(), _chunks(settings)):
            yield from results


def _chunks(settings: Settings) -> list[list[Path]]:
    """The test files in their order, as many in a chunk as one process shall run."""
    roots = [settings.checkout / name for name in settings.only] or [settings.checkout]
    files = sorted(path for root in roots for path in ([root] if root.is_file() else root.rglob("test_*.py")))
    chunks: list[list[Path]] = []
    size = _CHUNK
    for path in files:
        if size >= _CHUNK:
            chunks.append([])
            size = 0
        chunks[-1].append(path.relative_to(settings.checkout))
        size += path.stat().st_size
    return chunks


class _Chunk:
    """Some files, run in a copy of the checkout: Lightning's tests look for files that others leave behind."""

    def __init__(self, settings: Settings, files: Sequence[Path]) -> None:
        self._settings = settings
        self._files = files
        self._results: dict[str, TestResult] = {}
        self._done = [result.name for result in settings.done]

    def run(self) -> list[TestResult]:
        with tempfile.TemporaryDirectory(prefix="lightning-suite-") as folder:
            tests = Path(folder, "tests", "tests_pytorch")
            shutil.copytree(self._settings.checkout, tests, ignore=shutil.ignore_patterns("__pycache__"))
            project = self._settings.checkout.parents[1] / "pyproject.toml"
            if project.exists():
                shutil.copy(project, folder)
            known = -1
            while len(self._results) > known:  # a process that runs no test at all isn't started again
                known = len(self._results)
                if self._run_process(Path(folder)):
                    break
        return list(self._results.values())

    def _run_process(self, folder: Path) -> bool:
        """Run what has no result yet; whether the process came to its end."""
        log, done = folder / "log.jsonl", folder / "done.json"
        log.write_text("")
        done.write_text(json.dumps([*self._done, *self._results]))
        output = (folder / "output.txt").open("w")
        process = subprocess.Popen(
            self._command(log, done), cwd=folder, env=self._environment(folder), stdout=output, stderr=output
        )
        hung = _wait(process, log, self._settings.limit + _TO_START)
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        finished = any(line["outcome"] == "finished" for line in lines)
        results = {line["name"]: TestResult(**line) for line in lines if line["outcome"] != "finished"}
        for name, result in results.items():
            if result.outcome == "started":
                what = "hung" if hung else "crashed"
                results[name] = TestResult(name, what, (folder / "output.txt").read_text()[-2000:])
        self._results.update(results)
        if not finished and not results:
            print((folder / "output.txt").read_text()[-4000:], file=sys.stderr)
        return finished

    def _command(self, log: Path, done: Path) -> list[str]:
        settings = self._settings
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [
            "-p",
            "tests.lightning_suite.plugin",
            "-o",
            "addopts=",
            "--tb=short",
            "--continue-on-collection-errors",
        ]
        command += ["--suite-strategy", settings.strategy, "--suite-microbatches", str(settings.num_microbatches)]
        command += ["--suite-log", str(log), "--suite-done", str(done), "--disable-pytest-warnings"]
        command += ["--continue-on-collection-errors"]
        command += ["--timeout", str(settings.limit), "--timeout-method", "signal", "--basetemp", str(log.parent / "t")]
        command += ["-k", settings.select] if settings.select else []
        return command + [str(Path("tests", "tests_pytorch", path)) for path in self._files]

    def _environment(self, folder: Path) -> dict[str, str]:
        paths = [str(folder / "tests"), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            **_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }


def _wait(process: "subprocess.Popen[bytes]", log: Path, limit: float) -> bool:
    """Wait for the end of the process; whether it had to be killed since its log had not grown for so long."""
    size, since = -1, time.monotonic()
    while process.poll() is None:
        if (now_size := log.stat().st_size) != size:
            size, since = now_size, time.monotonic()
        if time.monotonic() - since > limit:
            process.kill()
            process.wait()
            return True
        threading.Event().wait(_LOOK)
    return False

"""Runs the tests of this folder on the CPU, as a part of the suite, and on GPUs: `python3 -m pytest -m gpu tests/gpu`.

Each test is a function of a device, which runs in workers of the pool. On a GPU they end with the part, or with a test
that fails: a lost CUDA context or memory that is kept concerns no other test. A test that hangs ends after its limit,
with the stacks of all threads.
"""

import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import limits
from tests.harness.devices import ENVIRONMENT, LOADED, with_environment
from tests.harness.pool import Pool, RunFailed

PARTS = (
    "single", "threads", "syncs", "fused", "compiled", "nccl", "loopback", "staged", "spinning", "traces", "several",
)  # fmt: skip
"""the files of this folder, in the order in which they run: what is cheap and says most comes first"""
IN_ONE_PROCESS = ("loopback", "spinning", "staged", "syncs")
"""the parts where a stream waits for threads of its own process: loading a kernel would wait for the device"""
PART_S, ALL_S = 240.0, 540.0
"""the time that one part may take on GPUs, and all of them together"""

_started = time.monotonic()
_spent: defaultdict[str, float] = defaultdict(float)


def pytest_report_header() -> str:
    """The GPUs and versions, for whoever reads the figures."""
    import torch

    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    cards = limits.run(query).stdout.strip() if shutil.which(query[0]) else "no nvidia-smi"
    return f"torch {torch.__version__}, CUDA {torch.version.cuda}, GPUs: {cards}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    own = [index for index, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ordered = sorted((items[index] for index in own), key=lambda item: PARTS.index(_part(item)))
    for index, item in zip(own, ordered, strict=True):
        items[index] = item
        if item.get_closest_marker("gpu"):  # what else warns on that machine is printed, and is no failure
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(PART_S + 60.0))  # the limits of launches come first


def _part(item: pytest.Item) -> str:
    return item.path.stem.removeprefix("test_")


class Launch:
    """Runs a function of a device in workers, and prints figures as they come."""

    def __init__(self, pool: Pool, part: str, write: Callable[[str], None]) -> None:
        self.pool, self.part, self.write = pool, part, write

    def __call__(
        self, device: str, world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0
    ) -> list[Any]:
        """The results of `function(device, *arguments)` on each rank; see `Pool.run`.

        On a GPU a part's tests use the same workers, until one fails: CUDA takes seconds to start.
        """
        __tracebackhide__ = True
        if device == "cpu":
            return self.pool.run(world_size, function, device, *arguments, timeout=timeout)
        if not _spent:
            self._check_forks()
        left = min(PART_S - _spent[self.part], _started + ALL_S - time.monotonic())
        if left < 1.0:
            pytest.fail(f"not run: {PART_S:g} s for {self.part}, or {ALL_S:g} s for all parts, are over")
        environment = ENVIRONMENT | (LOADED if self.part in IN_ONE_PROCESS else {})
        start = time.monotonic()
        try:
            return self.pool.run(
                world_size, with_environment, environment, function, device, *arguments, timeout=min(timeout, left)
            )
        except BaseException:
            self.pool.end_workers()
            raise
        finally:
            _spent[self.part] += time.monotonic() - start

    def _check_forks(self) -> None:
        """Let workers import by themselves if they can't use CUDA, because the fork server has used it in an import."""
        try:
            self.pool.run(1, _start_cuda)
        except RunFailed as error:
            self.write(f"workers import by themselves: {error.first.message}")
            self.pool.import_in_workers()
        self.pool.end_workers()  # CUDA has read another environment there

    def say(self, device: str, text: str) -> None:
        """Print a figure at once; on the CPU there is nothing to say."""
        if device != "cpu":
            self.write(f"{self.part}: {text}")


def _start_cuda() -> None:
    import torch

    torch.cuda.init()


@pytest.fixture
def launch(pool: Pool, request: pytest.FixtureRequest) -> Launch:
    """See `Launch`."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def write(line: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n  {line}", flush=True)

    return Launch(pool, _part(request.node), write)


@pytest.fixture(scope="module", autouse=True)
def _new_workers(pool: Pool) -> Iterator[None]:
    """End the workers that have used a GPU with the part."""
    yield
    if _spent:
        pool.end_workers()

"""Configures all tests: the pool of workers, the order of tiers, time limits, and a clean process after each test."""

import gc
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import hypothesis
import pytest

from tests.harness.limits import CLOCK, Watchdog
from tests.harness.pool import Pool
from tests.harness.tiers import ORDER, Durations, tier_of

DURATIONS = pytest.StashKey[Durations]()
POOL = pytest.StashKey[Pool]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DURATIONS] = Durations()
    config.stash[POOL] = Pool()
    CLOCK.start()
    if not config.getoption("numprocesses", None):  # a process that collects tests
        gc.disable()  # until all are collected, since what is imported for them is no garbage
    os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"  # Lightning 2.6.6 itself calls what 4.53 deprecates
    config.pluginmanager.register(_DurationRecorder(config.stash[DURATIONS]))
    _no_limit_per_example()


def _no_limit_per_example() -> None:
    """The limit of a test holds for all its examples together; a single example has none."""
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("suite")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[POOL].close()
    CLOCK.stop()


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Measure the time limits of tests in scaled seconds."""
    import pytest_timeout

    expired = partial(pytest_timeout.timeout_timer, item, settings)
    item.cancel_timeout = Watchdog(settings.timeout, expired, f"limit of {item.name}").cancel  # type: ignore[attr-defined]
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(tier_of(item.nodeid)))  # a stable sort: the order within a tier stays
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if on_gpu:
        _skip_without_gpu(on_gpu)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and a torch that is built for it"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Search for garbage again, and let the pool's fork server import torch and Lightning while the first tier runs."""
    gc.freeze()  # all that was collected stays, so later searches skip it
    gc.enable()
    needed = any("pool" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        session.config.stash[POOL].start()


class _DurationRecorder:
    def __init__(self, durations: Durations) -> None:
        self.durations = durations

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations.add(report.nodeid, report.duration)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash[DURATIONS].lines()
    if lines:
        terminalreporter.section("duration per tier")
        terminalreporter.write_line("\n".join([*lines, CLOCK.summary()]))


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Pool:
    """Worker processes for the whole session: `pool.run(world_size, function, *arguments)`."""
    return request.config.stash[POOL]


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Restore the environment, and destroy a process group that the test has left."""
    environment = dict(os.environ)
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)

"""What all tests share: the pool of live workers, the order of the tiers, and a clean process after each test."""

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
    config.pluginmanager.register(_Clock(config.stash[DURATIONS]))
    _no_limit_per_example()


def _no_limit_per_example() -> None:
    """A test as a whole has a limit, which is scaled by how slow the machine is; its examples have none."""
    slow = [hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=slow)
    hypothesis.settings.load_profile("suite")


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[POOL].close()
    CLOCK.stop()


@pytest.hookimpl(optionalhook=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Count a test's limit in scaled seconds, whether it is the suite's or a marker's."""
    import pytest_timeout

    expired = partial(pytest_timeout.timeout_timer, item, settings)
    item.cancel_timeout = Watchdog(settings.timeout, expired, f"limit of {item.name}").cancel  # type: ignore[attr-defined]
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(tier_of(item.nodeid)))  # stable: inside a tier nothing moves
    if any(tier_of(item.nodeid) == "gpu" or item.get_closest_marker("gpu") for item in items):
        _skip_without_gpu(items)


def _skip_without_gpu(items: list[pytest.Item]) -> None:
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if tier_of(item.nodeid) == "gpu" or item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the pool import torch and Lightning while the first tier runs."""
    needed = any("pool" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.option.collectonly:
        session.config.stash[POOL].start()


class _Clock:
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
    """Worker processes that live as long as the suite: `pool.run(world_size, function, *arguments)`."""
    return request.config.stash[POOL]


@pytest.fixture(autouse=True)
def _clean_process() -> Iterator[None]:
    """Leave environment and process group as they were, even after a failure."""
    environment = dict(os.environ)
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)

"""A run's processes return what their function returns, or why it did not, and none is left behind."""

import os
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from lightning_hanayo.checking import trainings
from lightning_hanayo.checking.case import RankFailure, RankResult
from lightning_hanayo.checking.comparison import Key
from tests.harness.limits import real_seconds
from tests.harness.thorough import covered


def environment(*names: str) -> RankResult:
    print("this is not shown")
    text = " ".join(os.environ[name] for name in names)
    return RankResult({Key(0, "loss", "x"): torch.ones(2)}, stack=text)


def fails_on_one(rank: str) -> RankResult | RankFailure:
    if os.environ["RANK"] == rank:
        return RankFailure(int(rank), "ValueError", "as planned")
    time.sleep(3600)
    raise AssertionError


def dies(_: Any) -> RankResult:
    print("last words", flush=True)
    os._exit(7)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = psutil.Process().children(recursive=True)
    yield
    left = set(psutil.Process().children(recursive=True)) - set(before)
    # Python's own, which ends with the process that has spawned another one.
    assert [process for process in left if not any("resource_tracker" in part for part in process.cmdline())] == []


def test_each_rank_finds_its_place_in_the_environment(capfd: pytest.CaptureFixture[str]) -> None:
    results = trainings.run(2, environment, "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    assert [isinstance(one, RankResult) and one.stack for one in results] == ["0 0 2 127.0.0.1", "1 1 2 127.0.0.1"]
    assert capfd.readouterr() == ("", "")


def write(tensor: torch.Tensor) -> RankResult:
    tensor.zero_()
    return RankResult({})


@pytest.mark.parametrize("platform", covered(["linux", "darwin"], by=["linux"]))
def test_what_a_rank_writes_into_its_arguments_stays_there(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "PLATFORM", platform)
    tensor = torch.ones(2)
    assert trainings.run(1, write, tensor)[0] == RankResult({})
    assert torch.equal(tensor, torch.ones(2))


def test_tensors_come_back() -> None:
    (result,) = trainings.run(1, environment, "RANK")
    assert isinstance(result, RankResult) and torch.equal(result.values[Key(0, "loss", "x")], torch.ones(2))


def test_the_others_are_killed_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "GRACE", 0.1)
    failure, other = trainings.run(2, fails_on_one, "0")
    assert isinstance(failure, RankFailure) and failure.message == "as planned"
    assert isinstance(other, RankFailure) and other.kind == "timed out"


@pytest.mark.thorough
def test_a_rank_that_takes_too_long_is_killed() -> None:
    (failure,) = trainings.run(1, fails_on_one, "1", timeout=real_seconds(0.5))
    assert isinstance(failure, RankFailure) and failure.kind == "timed out"


def test_a_rank_that_dies_shows_what_it_printed_last() -> None:
    (failure,) = trainings.run(1, dies, None)
    assert isinstance(failure, RankFailure)
    assert (failure.kind, failure.message) == ("died", "the process ended with exit code 7")
    assert "last words" in failure.trace

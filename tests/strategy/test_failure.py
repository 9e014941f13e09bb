"""What a rank does when it or another one has failed: native groups are aborted, and before anything else."""

import atexit
import json
import threading
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hanayo.strategy import failure
from lightning_hanayo.strategy.failure import Failure, Failures, leave_at_exit, leave_group
from lightning_hanayo.strategy.groups.factory import DATA
from lightning_hanayo.strategy.lightning.parallel_strategy import MeshParallelStrategy
from lightning_hanayo.strategy.session import Session
from tests.faults import script
from tests.harness.fake_groups import FakeGroups, channels_over_gloo, fake_world
from tests.harness.limits import real_seconds
from tests.harness.pool import Pool, RunFailed

ADDRESS = ("localhost", 1)


@pytest.mark.parametrize(("backend", "calls"), [("cpu:gloo,cuda:nccl", ["abort"]), ("gloo", ["destroy"])])
def test_only_native_groups_are_aborted(backend: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(failure, "_left", {})
    with fake_world(0, 2), monkeypatch.context() as patch:
        patch.setattr(failure, "_abort_process_group", lambda: made.append("abort"))
        patch.setattr(dist, "destroy_process_group", lambda: made.append("destroy"))
        patch.setattr(dist, "get_backend", lambda: backend)
        leave_group(ADDRESS)
        assert made == calls
        assert ADDRESS in failure._left


def test_aborted_groups_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_left", {})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    leave_group(ADDRESS)
    assert not dist.is_initialized()


def test_groups_are_aborted_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the others, as it may on a device where the kernels of all of them run."""
    together = threading.Barrier(3, timeout=real_seconds(20.0))
    with fake_world(0, 4):
        factory = FakeGroups()
        factory.tensors(((0, 1), (2, 3)), DATA)
        factory.channel(((0, 1), (2, 3)), "up")
        factory.channel(((0, 1), (2, 3)), "down")

        class Waiting:
            abort = staticmethod(together.wait)

        monkeypatch.setattr(factory, "_tensor_groups", [Waiting() for _ in factory._tensor_groups])
        factory.abort()
        factory.abort()  # does nothing
    assert not together.broken and not together.n_waiting


def test_a_rank_aborts_its_transfers_when_another_has_failed() -> None:
    aborted = threading.Event()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        failures = Failures(0, aborted.set)
        failures.store.set(failure._KEY, json.dumps(asdict(Failure(1, "it has failed", 1))))
        assert aborted.wait(real_seconds(20.0))
        failures.stop()
        assert failures._abort is None
    finally:
        dist.destroy_process_group()


def test_a_rank_aborts_nothing_after_its_run() -> None:
    aborted: list[None] = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        failures = Failures(0, lambda: aborted.append(None))
        failures.stop()
        failures.store.set(failure._KEY, json.dumps(asdict(Failure(1, "it has failed", 1))))
        failures._look()
    finally:
        dist.destroy_process_group()
    assert not aborted


def test_a_rank_aborts_its_transfers_when_rank_0_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it the store has ended, and with it the only way to hear why."""
    aborted = threading.Event()
    monkeypatch.setattr(failure, "GRACE", 0.1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        failures = Failures(0, aborted.set)

        failures.store = Mock(**{f"{method}.side_effect": RuntimeError for method in ("check", "get", "set")})
        assert aborted.wait(real_seconds(20.0))
        failures.stop()
    finally:
        dist.destroy_process_group()


def order_of_exit() -> list[str]:
    """What a failing rank calls on its way out."""
    calls: list[str] = []

    def note(name: str, of: type, method: str) -> None:
        original = getattr(of, method)
        patch.setattr(of, method, lambda *args, **options: (calls.append(name), original(*args, **options))[1])

    with pytest.MonkeyPatch.context() as patch, channels_over_gloo():
        note("abort transfers", MeshParallelStrategy, "abort_transfers")
        note("abandon the run", Session, "abandon")
        note("leave the group", MeshParallelStrategy, "disconnect_processes")
        note("close the run", Session, "close")
        with pytest.raises(RuntimeError, match="the planned fault"):
            script.train(1, 1, script.Fault("training_step", "0"))
        assert not dist.is_initialized()
    return calls


def test_a_failing_rank_aborts_first(pool: Pool) -> None:
    assert pool.run(1, order_of_exit) == [["abort transfers", "abandon the run", "leave the group", "close the run"]]


def clean_exit() -> list[str]:
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch, channels_over_gloo():
        patch.setattr(MeshParallelStrategy, "abort_transfers", lambda self: calls.append("abort"))
        patch.setattr(atexit, "register", lambda function: calls.append(function.__name__))
        script.train(1, 1, script.Fault("nowhere", "0"))
        assert dist.is_initialized()
        leave_at_exit()
        assert not dist.is_initialized()
    return calls


def test_without_a_failure_groups_are_left_when_the_process_ends(pool: Pool) -> None:
    assert pool.run(1, clean_exit) == [["leave_at_exit"]]


def train_over_channels(pipe: int, fault: script.Fault) -> None:
    with channels_over_gloo():
        script.train(pipe, 1, fault)


@pytest.mark.parametrize(("site", "rank"), [("backward", 1), pytest.param("hook", 0, marks=pytest.mark.thorough)])
def test_a_fault_over_channels_ends_all_ranks(pool: Pool, site: str, rank: int) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(2, train_over_channels, 2, script.Fault(site, str(rank)), timeout=30.0)
    kinds = {failed.rank: failed.kind for failed in caught.value.failures}
    assert kinds == dict.fromkeys(range(2), "PeerFailed") | {rank: "RuntimeError"}

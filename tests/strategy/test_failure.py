"""What a rank does when it or another one has failed: native groups are aborted, and before anything else."""

import atexit
import copy
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_hanayo.errors import PeerFailed
from lightning_hanayo.strategy import failure
from lightning_hanayo.strategy.failure import Failure, Failures, leave_at_exit, leave_group
from lightning_hanayo.strategy.groups import DATA
from lightning_hanayo.strategy.lightning.parallel_strategy import MeshParallelStrategy
from lightning_hanayo.strategy.session import Session
from tests.faults import script
from tests.harness.fake_groups import FakeGroups, channels_over_gloo, fake_world
from tests.harness.limits import real_seconds, wait_until
from tests.harness.monitors import worlds
from tests.harness.pool import Pool, RunFailed

ADDRESS = ("localhost", 1)
CLOSED = "[/pytorch/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4\nframe #0"


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


@contextmanager
def failures_of(num_ranks: int, cause_time: float = 600.0) -> Iterator[tuple[list[Failures], list[threading.Event]]]:
    """What each rank of a world knows, and an event that is set when its transfers are aborted."""
    aborted = [threading.Event() for _ in range(num_ranks)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # a slow machine shall neither end this process nor take a consequence for a cause
        with worlds() as world, pytest.MonkeyPatch.context() as patch:
            patch.setattr(failure, "GRACE", 600.0)
            patch.setattr(failure, "CAUSE_TIME", cause_time)
            ranks = [Failures(one.rank, one, aborted[one.rank].set) for one in world(num_ranks)]
            try:
                yield ranks, aborted
            finally:  # else they would end this process
                for one in ranks:
                    one.stop()
    finally:
        dist.destroy_process_group()


def agreed(ranks: list[Failures]) -> list[Failure | None]:
    """The first failure, once each of the ranks knows it."""
    assert wait_until(lambda: all(one.first is not None for one in ranks), 20.0)
    return [one.first for one in ranks]


def test_all_ranks_agree_on_the_first_failure() -> None:
    with failures_of(4) as (ranks, _):
        fault = KeyError("the planned fault")
        fault.add_note("This was here.")
        own = ranks[2].publish(fault)
        text = "rank 2 (pipeline 2): KeyError: 'the planned fault'. This was here."
        assert own == Failure(2, text, 1, 2, is_shown=True)
        assert agreed(ranks) == [own] * 4
        with pytest.raises(PeerFailed, match="the planned fault"):
            ranks[0].explain(ValueError("a later one"))
        ranks[2].explain(KeyError("the planned fault"))


@pytest.mark.parametrize("text", [CLOSED, "Application timeout caused pair closure"])
def test_a_lost_connection_is_a_consequence(text: str) -> None:
    lost = RuntimeError(text)
    with failures_of(2) as (ranks, _):
        cause = threading.Timer(0.1, ranks[1].publish, [KeyError("the planned fault")])
        cause.start()
        with pytest.raises(PeerFailed, match=r"^rank 1 \(pipeline 1\): KeyError: 'the planned fault'$"):
            ranks[0].on_transfer(lost)
        cause.join()


def test_a_lost_connection_without_a_cause_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lost = RuntimeError(CLOSED)
    expected = "rank 0 (pipeline 0) has lost a connection, or waited in vain: Connection closed by peer [127.0.0.1]:4"
    with failures_of(2, cause_time=0.1) as (ranks, _):
        with pytest.raises(PeerFailed) as raised:
            ranks[0].explain(lost)
        assert str(raised.value) == expected
        assert wait_until(lambda: capsys.readouterr().err == expected + "\n", 20.0)


def test_a_rank_aborts_its_transfers_when_another_has_failed() -> None:
    with failures_of(2) as (ranks, aborted):
        ranks[1].publish(KeyError("the planned fault"))
        assert aborted[0].wait(real_seconds(20.0))
    assert ranks[0]._abort is None
    assert not aborted[1].is_set()


def test_a_rank_aborts_nothing_after_its_run() -> None:
    with failures_of(2) as (ranks, aborted):
        ranks[0].stop()
        ranks[1].publish(KeyError("the planned fault"))
        agreed(ranks)
    assert not aborted[0].is_set()


def test_a_rank_that_ends_without_a_word_has_failed(capsys: pytest.CaptureFixture[str]) -> None:
    with failures_of(3) as (ranks, _):
        assert wait_until(lambda: len(ranks[2].positions()) == len(ranks[1].positions()) == 3, 20.0)
        ranks[0].stop()  # its run is over: it may end
        assert wait_until(lambda: ranks[1].positions()[0] == failure._ENDED, 20.0)
        ranks[0].monitor.close()
        ranks[2].monitor.close()
        (first,) = agreed(ranks[1:2])
        assert first == Failure(2, "rank 2 (pipeline 2) ended while others still ran", 1, 1, is_shown=False)


def test_others_are_asked_how_far_they_are() -> None:
    with failures_of(3) as (ranks, _):
        ranks[1].position = (3, 0, 1, 0)
        ranks[2].stop()
        assert wait_until(lambda: len(ranks[0].positions()) == 3, 20.0)
        assert ranks[0].positions() == {0: (0, 0, 0, 0), 1: (3, 0, 1, 0), 2: failure._ENDED}


def test_a_rank_whose_run_is_over_notes_that_others_end_theirs_after_a_failure() -> None:
    """Else it would take them for ranks that can't end, and kill processes that go on with other work."""
    with failures_of(3) as (ranks, _):
        ranks[0].stop()
        for one in ranks[1:]:
            one.publish(KeyError("the planned fault in a hook after the run"))
            one.stop()
        assert wait_until(lambda: {1, 2} <= ranks[0]._finished, 20.0)


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


def ask_the_store_late() -> int:
    script.train(2, 1, script.Fault("nowhere", "0"))
    if dist.get_rank() == 1:
        time.sleep(0.5)
    return _get_default_store().add("asked", 1)


def test_the_rank_that_serves_the_store_leaves_last(pool: Pool) -> None:
    assert pool.run(2, ask_the_store_late) == [1, 2]


def copy_after_a_run() -> None:
    strategy = script.train(2, 1, script.Fault("nowhere", "0"))
    assert dist.is_initialized()  # its monitor lives as long
    for same in (copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        assert same.options == strategy.options


def test_a_strategy_whose_monitor_lives_can_be_copied_and_pickled(pool: Pool) -> None:
    pool.run(2, copy_after_a_run)


def train_over_channels(pipe: int, fault: script.Fault) -> None:
    with channels_over_gloo():
        script.train(pipe, 1, fault)


@pytest.mark.parametrize(("site", "rank"), [("backward", 1), pytest.param("hook", 0, marks=pytest.mark.thorough)])
def test_a_fault_over_channels_ends_all_ranks(pool: Pool, site: str, rank: int) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(2, train_over_channels, 2, script.Fault(site, str(rank)), timeout=30.0)
    kinds = {failed.rank: failed.kind for failed in caught.value.failures}
    assert kinds == dict.fromkeys(range(2), "PeerFailed") | {rank: "RuntimeError"}

"""The pool sets ranks and environment, reports the cause first, and is unaffected by failures."""

import _thread
import os
import signal
import sys
import threading
import time
import warnings

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness import models
from tests.harness.limits import wait_until
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, make_loader, make_trainer


def total_of_ranks(start: int) -> tuple[int, int]:
    dist.init_process_group("gloo")
    total = torch.tensor(start + dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def fail_on(rank: int, how: str) -> str:
    dist.init_process_group("gloo")
    dist.barrier()  # a rank that fails while others connect may make their gloo hang
    if dist.get_rank() != rank:
        dist.barrier()  # never completes
    if how == "raises":
        raise ArithmeticError(f"boom on {rank}")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hangs":
        time.sleep(3600)
    return "unreachable"


def change_process() -> None:
    os.environ["CHANGED"] = "yes"
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")


def is_clean() -> bool:
    return "CHANGED" not in os.environ and torch.get_default_dtype() == torch.float32 and not dist.is_initialized()


def leave_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(3600,), name="forgotten", daemon=True).start()


def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


def train_data_parallel() -> tuple[int, int, list[object], list[float]]:
    from lightning.pytorch.strategies import DDPStrategy

    trainer = make_trainer(Layout(), devices=2, strategy=DDPStrategy(), max_steps=2)
    module = models.build(models.MLP)
    trainer.fit(module, make_loader(models.vectors((8, 8))))
    started = trainer.strategy.launcher.procs
    return trainer.global_rank, trainer.world_size, started, module.head.bias.tolist()


def test_lightning_uses_the_workers_and_starts_no_process(pool: Pool) -> None:
    (first, *rest), (second, *same) = pool.run(2, train_data_parallel)
    assert (first, second) == (0, 1)
    assert rest == same and rest[:2] == [2, []]


def threads_of_a_foreign_one() -> int:
    """As autograd's thread of a GPU, one that Python has not started runs Python, and stays."""
    before = threading.active_count()  # what an earlier test compiled or showed may have left one
    has_run = threading.Event()

    def run() -> None:
        threading.current_thread()
        has_run.set()
        time.sleep(3600.0)

    _thread.start_new_thread(run, ())
    has_run.wait()
    return threading.active_count() - before


def test_a_thread_that_python_has_not_started_may_stay(pool: Pool) -> None:
    (num_threads,) = pool.run(1, threads_of_a_foreign_one)
    pool.end_workers()
    assert num_threads == 1


def test_run_returns_the_result_of_every_rank(pool: Pool) -> None:
    assert pool.run(2, total_of_ranks, 10) == [(0, 21), (1, 21)]
    assert pool.run(4, total_of_ranks, 0) == [(rank, 6) for rank in range(4)]


@pytest.mark.parametrize(
    ("how", "kind"),
    [("raises", "ArithmeticError"), ("dies", "died"), pytest.param("hangs", "timed out", marks=pytest.mark.thorough)],
)
def test_a_failure_names_its_rank_and_later_runs_succeed(pool: Pool, how: str, kind: str) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(3, fail_on, 1, how, timeout=2.0)
    assert (1, kind) in [(failure.rank, failure.kind) for failure in caught.value.failures]
    if how == "raises":
        assert caught.value.first.rank == 1 and caught.value.first.message == "boom on 1"
    if how == "hangs":
        assert "in fail_on" in str(caught.value)  # the function in which it hangs
    assert pool.run(3, total_of_ranks, 0) == [(rank, 3) for rank in range(3)]


@pytest.mark.thorough
def test_a_hang_after_a_trainer_shows_its_stacks(pool: Pool) -> None:
    pool.run(2, train_data_parallel)
    with pytest.raises(RunFailed, match="in fail_on"):
        pool.run(2, fail_on, 1, "hangs", timeout=2.0)


def test_workers_are_restored_after_each_run(pool: Pool) -> None:
    pool.run(2, change_process)
    assert pool.run(2, is_clean) == [True, True]


def test_a_thread_that_still_runs_is_reported(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="forgotten"):
        pool.run(1, leave_a_thread)
    assert pool.run(1, is_clean) == [True]


def test_warnings_are_errors_in_workers_too(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="careful"):
        pool.run(1, warn)


def test_runs_reuse_the_workers(pool: Pool) -> None:
    assert pool.run(2, os.getpid) == pool.run(3, os.getpid)[:2] == pool.run(2, os.getpid)


def test_close_ends_all_processes() -> None:
    pool = Pool(imports=False)
    sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
    child, *_ = pool.run(2, os.spawnv, os.P_NOWAIT, sys.executable, sleeper)
    started = [child, *(process.pid for process in psutil.Process(pool._fork_server.pid).children())]
    pool.close()
    wait_until(lambda: not any(map(is_running, started)), 5.0)
    assert not [pid for pid in started if is_running(pid)]


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

"""The pool keeps its promises: ranks and environment, first cause first, no poison, nothing left behind."""

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
    dist.barrier()  # who fails while others still connect leaves them with a gloo that may hang, one time in a hundred
    if dist.get_rank() != rank:
        dist.barrier()  # never met
    if how == "raises":
        raise ArithmeticError(f"boom on {rank}")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "hangs":
        time.sleep(3600)
    return "unreachable"


def soil() -> None:
    os.environ["SOILED"] = "yes"
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")


def is_clean() -> bool:
    return "SOILED" not in os.environ and torch.get_default_dtype() == torch.float32 and not dist.is_initialized()


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


def test_lightning_takes_the_workers_as_its_processes(pool: Pool) -> None:
    (first, *rest), (second, *same) = pool.run(2, train_data_parallel)
    assert (first, second) == (0, 1)
    assert rest == same and rest[:2] == [2, []]


def test_every_rank_answers(pool: Pool) -> None:
    assert pool.run(2, total_of_ranks, 10) == [(0, 21), (1, 21)]
    assert pool.run(4, total_of_ranks, 0) == [(rank, 6) for rank in range(4)]


@pytest.mark.parametrize(("how", "kind"), [("raises", "ArithmeticError"), ("dies", "died"), ("hangs", "timed out")])
def test_failure_names_its_rank_and_poisons_nothing(pool: Pool, how: str, kind: str) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(3, fail_on, 1, how, timeout=2.0)
    assert (1, kind) in [(failure.rank, failure.kind) for failure in caught.value.failures]
    if how == "raises":
        assert caught.value.first.rank == 1 and caught.value.first.message == "boom on 1"
    if how == "hangs":
        assert "in fail_on" in str(caught.value)  # the line it hangs in
    assert pool.run(3, total_of_ranks, 0) == [(rank, 3) for rank in range(3)]


def test_a_hang_shows_its_stacks_after_a_trainer_too(pool: Pool) -> None:
    pool.run(2, train_data_parallel)
    with pytest.raises(RunFailed, match="in fail_on"):
        pool.run(2, fail_on, 1, "hangs", timeout=2.0)


def test_worker_is_as_good_as_new(pool: Pool) -> None:
    pool.run(2, soil)
    assert pool.run(2, is_clean) == [True, True]


def test_forgotten_thread_is_reported(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="forgotten"):
        pool.run(1, leave_a_thread)
    assert pool.run(1, is_clean) == [True]


def test_warnings_are_errors_in_workers_too(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="careful"):
        pool.run(1, warn)


def test_a_run_starts_no_process(pool: Pool) -> None:
    assert pool.run(2, os.getpid) == pool.run(3, os.getpid)[:2] == pool.run(2, os.getpid)


def test_nothing_is_left_at_the_end() -> None:
    pool = Pool(imports=False)
    sleeper = [sys.executable, "-c", "import time; time.sleep(3600)"]
    child, *_ = pool.run(2, os.spawnv, os.P_NOWAIT, sys.executable, sleeper)
    mine = [child, *(process.pid for process in psutil.Process(pool._zygote.pid).children())]
    pool.close()
    wait_until(lambda: not any(map(is_running, mine)), 5.0)
    assert not [pid for pid in mine if is_running(pid)]


def is_running(pid: int) -> bool:
    """Whether the process is more than an entry that nobody has collected yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

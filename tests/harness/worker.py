"""Runs tasks in a worker process of the pool, and restores the process after each."""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from lightning_hanayo.monitor.processes import end_with_parent
from tests.harness.limits import VARIABLE, stretch_grace

DUMP_STACKS = signal.SIGUSR1  # writes the stacks of all threads to the worker's log
IGNORED_THREADS = ("TMonitor", "tqdm_monitor")  # of several versions of tqdm; they never end
"""and dummies, which stand for threads of others that once ran Python: autograd's, of which each GPU has one"""
JOIN_S = 2.0  # to wait for threads that are ending, on an idle machine


@dataclass(frozen=True)
class Task:
    """A function, its arguments, its environment variables and warning filters."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    filters: list[Any]  # of `warnings`, so that a warning that is an error in the test is one in the worker


@dataclass(frozen=True)
class Failure:
    """The failure of one rank, and its time."""

    rank: int
    kind: str  # the exception's class, or "died" or "timed out"
    message: str
    trace: str = ""
    when: float = 0.0  # time.monotonic(), the same clock in all processes
    bases: tuple[str, ...] = ()  # names of the exception's classes
    output: str = ""  # the end of what the worker printed

    def __str__(self) -> str:
        printed = f"\n--- printed by rank {self.rank} ---\n{self.output}" if self.output else ""
        return f"rank {self.rank} {self.kind}: {self.message}\n{self.trace}{printed}"


def serve(connection: int, log: int) -> None:
    """Run tasks until the pool closes the connection. Answer each with `("ok", result)` or `("failed", Failure)`."""
    os.setsid()  # a new process group, so that processes that a test starts are killed with the worker
    end_with_parent()
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    pool = Connection(connection)
    pool.send_bytes(b"ready")
    while True:
        try:
            request = pool.recv_bytes()
        except EOFError:
            os._exit(0)
        pool.send_bytes(_answer(request))


def _answer(request: bytes) -> bytes:
    rank, path, directory, payload = pickle.loads(request)
    sys.path[:] = path
    # A Trainer resets all signal handlers to those that Python knows when it ends; faulthandler's isn't one of them.
    faulthandler.unregister(DUMP_STACKS)
    faulthandler.register(DUMP_STACKS, file=2, all_threads=True)
    try:
        with _restored_process(rank, directory):
            task: Task = pickle.loads(payload)
            os.environ.update(task.environment)
            if "lightning_hanayo.strategy" in sys.modules:
                stretch_grace()
            with warnings.catch_warnings():
                warnings.filters[:] = task.filters
                warnings._filters_mutated()  # type: ignore[attr-defined]
                result = task.function(*task.arguments)
        return pickle.dumps(("ok", result))
    except BaseException as error:  # including SystemExit, which the pool interprets
        return pickle.dumps(("failed", _failure(rank, error)))


def _failure(rank: int, error: BaseException) -> Failure:
    kind = type(error)
    trace = "".join(traceback.format_exception(error))
    bases = tuple(base.__name__ for base in kind.__mro__)
    return Failure(rank, kind.__name__, str(error), trace, getattr(error, "_when", time.monotonic()), bases)


@contextmanager
def _restored_process(rank: int, directory: str) -> Iterator[None]:
    """Undo the changes that a test makes to its process. Threads that still run are an error of the test."""
    environment, before = dict(os.environ), set(threading.enumerate())
    os.chdir(directory)
    _reset(rank)
    try:
        yield
    except BaseException as error:
        error._when = time.monotonic()  # type: ignore[attr-defined]
        _restore(environment)
        raise
    slowness = float(os.environ.get(VARIABLE, "1"))
    _restore(environment)
    leftover = [
        thread
        for thread in threading.enumerate()
        if thread not in before
        and thread.name not in IGNORED_THREADS
        and not isinstance(thread, threading._DummyThread)
    ]
    deadline = time.monotonic() + JOIN_S * slowness
    for thread in leftover:
        thread.join(max(0.0, deadline - time.monotonic()))
    alive = [thread.name for thread in leftover if thread.is_alive()]
    if alive:
        raise RuntimeError(f"threads still run after the test: {', '.join(alive)}")


def _reset(rank: int) -> None:
    if "torch" not in sys.modules:
        return
    import torch
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    rank_zero_only.rank = rank  # Lightning remembers the rank per process, not per Trainer


def _restore(environment: dict[str, str]) -> None:
    monitors = sys.modules.get("lightning_hanayo.strategy.joining")
    if monitors is not None:
        monitors.close_monitor()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.flush()
    gc.collect()
    gc.freeze()  # what is left stays: modules and caches, which later searches skip

"""A worker of the pool: runs one task after another and is as good as new after each."""

import ctypes
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

from tests.harness.limits import VARIABLE, stretch_grace

DUMP_STACKS = signal.SIGUSR1  # writes the stacks of all threads to the worker's log
QUIET_THREADS = ("TMonitor",)  # tqdm's: one per process, for ever
PATIENCE_S = 2.0  # for threads that are just ending, on an idle machine


@dataclass(frozen=True)
class Task:
    """A function, its arguments, and the surroundings it runs in."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    environment: dict[str, str]
    filters: list[Any]  # of `warnings`: an error in the test is an error in the worker


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank, and when."""

    rank: int
    kind: str  # the exception's class, or "died" or "timed out"
    message: str
    trace: str = ""
    when: float = 0.0  # time.monotonic(), one clock for all processes
    bases: tuple[str, ...] = ()  # names of the exception's classes
    output: str = ""  # the end of what the worker printed

    def __str__(self) -> str:
        printed = f"\n--- printed by rank {self.rank} ---\n{self.output}" if self.output else ""
        return f"rank {self.rank} {self.kind}: {self.message}\n{self.trace}{printed}"


def die_with_parent() -> None:
    """Ask Linux to end this process with its parent, whichever way that ends; elsewhere the closed socket must do."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def serve(connection: int, log: int) -> None:
    """The life of a worker: leave with the pool, answer every task with `("ok", result)` or `("failed", Failure)`."""
    os.setsid()  # a group of its own: whatever a test starts ends with the worker
    die_with_parent()
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
    # Lightning's Trainer, when it ends, resets all signals to the handlers that Python knows: this isn't one of them.
    faulthandler.unregister(DUMP_STACKS)
    faulthandler.register(DUMP_STACKS, file=2, all_threads=True)
    try:
        with _clean(rank, directory):
            task: Task = pickle.loads(payload)
            os.environ.update(task.environment)
            if "lightning_hanayo.strategy" in sys.modules:
                stretch_grace()
            with warnings.catch_warnings():
                warnings.filters[:] = task.filters
                warnings._filters_mutated()  # type: ignore[attr-defined]
                result = task.function(*task.arguments)
        return pickle.dumps(("ok", result))
    except BaseException as error:  # SystemExit too: the pool decides what it means
        return pickle.dumps(("failed", _failure(rank, error)))


def _failure(rank: int, error: BaseException) -> Failure:
    kind = type(error)
    trace = "".join(traceback.format_exception(error))
    bases = tuple(base.__name__ for base in kind.__mro__)
    return Failure(rank, kind.__name__, str(error), trace, getattr(error, "_when", time.monotonic()), bases)


@contextmanager
def _clean(rank: int, directory: str) -> Iterator[None]:
    """Undo what a test may leave behind in its process; threads that still run are the test's failure."""
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
    leftover = [thread for thread in threading.enumerate() if thread not in before and thread.name not in QUIET_THREADS]
    deadline = time.monotonic() + PATIENCE_S * slowness
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
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)
    sys.stdout.flush()
    gc.collect()

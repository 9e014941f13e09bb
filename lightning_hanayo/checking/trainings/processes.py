"""Runs a function as the ranks of a run, in processes of its own, which leave nothing behind.

On Linux they are forks of this process, as in Lightning's launcher for notebooks: they need neither a main module that
can be imported again nor a module that can be pickled. They compute on the CPU with one thread. Elsewhere they are
spawned.
"""

import multiprocessing
import os
import pickle
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lightning_hanayo.checking.case import RankFailure
from lightning_hanayo.monitor.processes import begin_fork
from lightning_hanayo.notebook import become_rank, start_forks
from lightning_hanayo.strategy.joining import serve_store

PLATFORM = sys.platform
GRACE = 15.0
"""seconds for the other ranks to end after one has failed; the strategy ends them after 5"""
_SHOWN_OUTPUT = 2000
"""characters of a dead rank's output in its failure"""


def run(world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """The results of `function(*arguments)`, a function of a module, on `world_size` ranks; or a `RankFailure` of each.

    Each rank finds MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE and NODE_RANK in its environment. What it
    prints is shown only if it dies. After `timeout` seconds all ranks are killed.
    """
    forks = PLATFORM == "linux" and not torch.cuda.is_initialized()  # a fork could not use the parent's GPUs
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    # A spawned process would share the memory of this one's tensors, were they not pickled here.
    work = (function, arguments) if forks else pickle.dumps((function, arguments))
    with TemporaryDirectory(prefix="hanayo-check-") as folder:
        store = serve_store()
        processes: list[BaseProcess] = [
            context.Process(target=_main, args=(folder, rank, world_size, store.port, work), daemon=True)
            for rank in range(world_size)
        ]
        try:
            start_forks(processes)
            _wait(processes, timeout)
            return [_result(rank, process, folder, timeout) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _wait(processes: list[BaseProcess], timeout: float) -> None:
    """Wait until all have ended, or `GRACE` has passed since one of them failed."""
    deadline = time.monotonic() + timeout
    running: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    while running and (left := deadline - time.monotonic()) > 0:
        for sentinel in wait(list(running), left):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                deadline = min(deadline, time.monotonic() + GRACE)


def _main(folder: str, rank: int, world_size: int, port: int, work: Any) -> None:
    """The main function of a rank's process."""
    begin_fork()
    result_path, log_path = _paths(folder, rank)
    sys.stdout = sys.stderr = log_path.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    become_rank(rank, world_size, port)
    function, arguments = pickle.loads(work) if isinstance(work, bytes) else work
    result = function(*arguments)
    partial = result_path.with_suffix(".partial")  # a rank that is killed meanwhile has no result
    torch.save(result, partial)
    partial.rename(result_path)
    sys.stdout.flush()
    os._exit(isinstance(result, RankFailure))  # without the exit functions of the parent, if this is its fork


def _result(rank: int, process: BaseProcess, folder: str, timeout: float) -> Any:
    result_path, log_path = _paths(folder, rank)
    if result_path.exists():
        return torch.load(result_path, weights_only=False)
    trace = log_path.read_text(errors="replace")[-_SHOWN_OUTPUT:] if log_path.exists() else ""
    if process.is_alive():
        return RankFailure(rank, "timed out", f"no answer within {timeout:g} s", trace)
    return RankFailure(rank, "died", f"the process ended with exit code {process.exitcode}", trace)


def _paths(folder: str, rank: int) -> tuple[Path, Path]:
    """The files of a rank's result, and of what it prints."""
    return Path(folder) / f"rank-{rank}.pt", Path(folder) / f"rank-{rank}.log"

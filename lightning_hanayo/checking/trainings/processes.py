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
import warnings
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from lightning_hanayo.checking.case import RankFailure, RankResult, Results
from lightning_hanayo.monitor.parent import end_with_parent
from lightning_hanayo.strategy.groups.joining import serve_store

PLATFORM = sys.platform
GRACE = 15.0
"""seconds for the other ranks to end after one has failed; the strategy ends them after 5"""
_SHOWN_OUTPUT = 2000
"""characters of a dead rank's output in its failure"""
_Work = tuple[Callable[..., Any], tuple[Any, ...]] | bytes
"""A function and its arguments; pickled for a process that is spawned."""


def run(world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 600.0) -> Results:
    """The results of `function(*arguments)`, a function of a module, on `world_size` ranks.

    Each rank finds MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE and NODE_RANK in its environment. What it
    prints is shown only if it dies. After `timeout` seconds all ranks are killed.
    """
    forks = PLATFORM == "linux"
    context: Any = multiprocessing.get_context("fork" if forks else "spawn")
    # A spawned process would share the memory of this one's tensors, were they not pickled here.
    work: _Work = (function, arguments) if forks else pickle.dumps((function, arguments))
    with TemporaryDirectory(prefix="hanayo-check-") as folder:
        store = serve_store()
        processes: list[BaseProcess] = [
            context.Process(target=_main, args=(folder, rank, world_size, store.port, work), daemon=True)
            for rank in range(world_size)
        ]
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # Python 3.12
                for process in processes:
                    process.start()
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


def _main(folder: str, rank: int, world_size: int, port: int, work: _Work) -> None:
    """The main function of a rank's process."""
    end_with_parent()
    sys.stdout = sys.stderr = _output(folder, rank).open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    names = {"RANK": rank, "LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # it is the parent's
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    # A fork has lost the threads of its parent's OpenMP, and would wait for them. Lightning reads the variable.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    function, arguments = pickle.loads(work) if isinstance(work, bytes) else work
    result = function(*arguments)
    partial = _file(folder, rank).with_suffix(".partial")
    torch.save(result, partial)
    partial.rename(_file(folder, rank))
    sys.stdout.flush()
    os._exit(not isinstance(result, RankResult))  # without the exit functions of the parent, if this is its fork


def _result(rank: int, process: BaseProcess, folder: str, timeout: float) -> RankResult | RankFailure:
    result = _load(folder, rank)
    if result is not None:
        return result
    printed = _output(folder, rank)
    trace = printed.read_text(errors="replace")[-_SHOWN_OUTPUT:] if printed.exists() else ""
    if process.is_alive():
        return RankFailure(rank, "timed out", f"no answer within {timeout:g} s", trace)
    return RankFailure(rank, "died", f"the process ended with exit code {process.exitcode}", trace)


def _load(folder: str, rank: int) -> RankResult | RankFailure | None:
    path = _file(folder, rank)
    return torch.load(path, weights_only=False) if path.exists() else None


def _file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.pt"


def _output(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank-{rank}.log"

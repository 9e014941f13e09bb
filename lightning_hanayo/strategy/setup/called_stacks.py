"""Finds the stack by the calls of a step, in a fork of a rank, of which nothing remains but names.

rank 0    set-up | waits ............................... | the names, to all ranks
fork               reads a batch, runs the step, ends
"""

import json
import os
import signal
import stat
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lightning_hanayo.monitor.processes import begin_fork
from lightning_hanayo.partition.stack import find_stack, passed_stacks
from lightning_hanayo.strategy.uncut_step import on_copy, recorded_calls

if TYPE_CHECKING:
    import lightning.pytorch as pl

_TIMEOUT = 300.0
"""seconds until the names count as unknown: another thread may have held a lock when it was forked"""


def called_stacks(
    module: "pl.LightningModule", take_batch: Callable[[], Any], step: str = "training_step"
) -> Sequence[str]:
    """The names of the stack to cut, and of all that a whole module's step calls; empty if that can't be known.

    Datasets, random numbers, and what the step changes are as before, as all of it happens in a fork.

    Args:
        module: not cut yet; with values, or on the meta device.
        take_batch: called in the fork.
        step: the name of the step.
    """
    if sys.platform != "linux":  # elsewhere forks crash in system libraries
        return ()
    rank, (from_fork, to_parent) = os.getpid(), os.pipe()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # it computes with one thread
        pid = os.fork()
    if pid == 0:
        try:
            begin_fork(rank)
            _isolate()
            torch.set_num_threads(1)  # a fork has lost the threads of OpenMP, and would wait for them
            os.write(to_parent, json.dumps(_names(module, take_batch(), step)).encode())
        finally:
            os._exit(0)
    os.close(to_parent)
    try:
        answer = os.read(from_fork, 1 << 16) if wait([from_fork], _TIMEOUT) else b""
    finally:
        os.close(from_fork)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return json.loads(answer) if answer else ()


def _names(module: "pl.LightningModule", batch: Any, step: str) -> list[str]:
    def find(own: "pl.LightningModule", batch: Any, _: set[int]) -> list[str]:
        calls = recorded_calls(own, batch, step)
        passed = [one.name for one in passed_stacks(own, calls)]
        return [find_stack(own, calls=calls).name, *passed] if passed else []

    return on_copy(module, batch, torch.get_default_dtype(), find)


def _isolate() -> None:
    """In a fork: print nothing, and use no connection of the parent's, such as those of its process groups."""
    dist.GroupMember.WORLD = None  # so that user code sees one process
    sys.stdout = sys.stderr = open(os.devnull, "r+")  # noqa: SIM115 - until the fork ends
    null_device = sys.stdout.fileno()
    for number in (1, 2, *map(int, os.listdir("/proc/self/fd"))):
        try:
            if number in (1, 2) or stat.S_ISSOCK(os.fstat(number).st_mode):
                os.dup2(null_device, number)
        except OSError:  # that of the folder
            continue

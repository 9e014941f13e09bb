"""Runs a benchmark's function in one process per rank, and ends all of them whatever happens."""

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.monitor.processes import end_with_parent
from recipes.benchmarks.machine import ProcessOptions

Work = Callable[[int, Any], Any]
"""The function that each rank runs: (rank, argument) -> result, with `torch.distributed` (gloo) initialised."""
GROUP_TIMEOUT_S = 1800.0  # the caller has a shorter limit and kills ranks that hang


def run(
    num_ranks: int, work: Work, argument: Any, options: list[ProcessOptions], timeout: float
) -> list[tuple[str, Any]]:
    """Run `work` on `num_ranks` fresh processes.

    Returns:
        For each rank the priority that it got, and the result of `work`.

    Raises:
        HanayoError: a rank failed or exited, or `timeout` seconds passed; the message holds the rank's traceback.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        try:
            ends: list[Connection] = []
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, num_ranks, Path(directory) / "store", options[rank], work, argument, theirs)
                process: BaseProcess = context.Process(target=_rank, args=arguments, daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                ends.append(ours)
            return _results(ends, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _results(ends: list[Connection], deadline: float) -> list[tuple[str, Any]]:
    found: dict[int, tuple[str, Any]] = {}
    while len(found) < len(ends):
        waiting = [end for rank, end in enumerate(ends) if rank not in found]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise HanayoError(f"ranks {[r for r in range(len(ends)) if r not in found]} didn't finish in time")
        for end in ready:
            rank = ends.index(end)  # type: ignore[arg-type]
            try:
                failure, priority, result = ends[rank].recv()
            except EOFError:
                failure, priority, result = "its process ended", "", None
            if failure:
                raise HanayoError(f"rank {rank} failed: {failure}")
            found[rank] = (priority, result)
    return [found[rank] for rank in range(len(ends))]


def _rank(
    rank: int, size: int, store: Path, options: ProcessOptions, work: Work, argument: Any, end: Connection
) -> None:
    """One rank's process."""
    end_with_parent()
    priority = options.apply()
    try:
        result = _connected(rank, size, store, work, argument)
    except BaseException:
        end.send((traceback.format_exc(), priority, None))
    else:
        end.send(("", priority, result))


def _connected(rank: int, size: int, store: Path, work: Work, argument: Any) -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        result = work(rank, argument)
        dist.barrier()  # no rank leaves while others still need it
        return result
    finally:
        dist.destroy_process_group()

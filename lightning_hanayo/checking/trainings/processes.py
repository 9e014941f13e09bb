"""Runs a function as the ranks of a run, in processes of its own, which leave nothing behind.

On Linux they are forks of this process, as in Lightning's launcher for notebooks: they need neither a main module that
can be imported again nor a module that can be pickled. They compute on the CPU with one thread. Elsewhere they are
spawned.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lightning_hanayo.checking.case import RankFailure
from lightning_hanayo.notebook import RankProcess, Ranks

PLATFORM = sys.platform
GRACE = 15.0
"""seconds for the other ranks to end after one has failed; the strategy ends them after 5"""


def run(world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = 600.0) -> list[Any]:
    """The results of `function(*arguments)`, a function of a module, on `world_size` ranks; or a `RankFailure` of each.

    Each rank finds MASTER_ADDR, MASTER_PORT, RANK, LOCAL_RANK, WORLD_SIZE and NODE_RANK in its environment. What it
    prints is shown only if it dies. After `timeout` seconds all ranks are killed.
    """
    forks = PLATFORM == "linux" and not torch.cuda.is_initialized()  # a fork could not use the parent's GPUs
    with Ranks(GRACE, timeout=timeout) as ranks:
        work = partial(function, *arguments)
        ranks.start(world_size, work, method="fork" if forks else "spawn", failure=RankFailure)
        ranks.follow()
        return [_result(one, timeout) for one in ranks.all]


def _result(one: RankProcess, timeout: float) -> Any:
    kind, value = one.answer
    if kind == "result":
        return value
    if kind:
        return RankFailure(one.rank, type(value).__name__, str(value), str(value.__cause__).strip('\n"'))
    if one.process.is_alive():
        return RankFailure(one.rank, "timed out", f"no answer within {timeout:g} s", one.printed)
    return RankFailure(one.rank, "died", f"the process ended with exit code {one.process.exitcode}", one.printed)

"""Refuses collectives of `torch.distributed` over the whole world where only some ranks run the user code that calls.

    dist.all_reduce(x) in training_step          pipeline rank 0 alone runs it: an error, not a wait without end
    dist.all_reduce(x) in on_train_epoch_end     all ranks run it, also those without data of their own: an error
    dist.all_reduce(x, group=mine)               as always
    dist.barrier() in on_train_epoch_end         as always

Users import these functions by name, so the code object of each function is replaced for the time of a run.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.strategy.user_code.collectives import UserCollectives

_REDUCING = (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "reduce", "reduce_scatter",
    "reduce_scatter_tensor", "gather", "gather_object", "all_to_all", "all_to_all_single",
)  # fmt: skip
"""what counts the ranks of the world"""
_OTHERS = (
    "barrier", "monitored_barrier", "broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "send",
    "recv", "isend", "irecv",
)  # fmt: skip
_SIZE = "get_world_size"
_WAY_OUT = (
    "Call self.all_gather, self.trainer.strategy.reduce, broadcast or barrier, which know the ranks with data; or "
    "log with self.log(..., sync_dist=True)"
)


@dataclass(frozen=True)
class Run:
    """A run in which user code may call these functions.

    Args:
        collectives: know which user code runs.
        num_pipe_ranks: P.
        cube_size: ranks that hold each stage together.
    """

    collectives: UserCollectives
    num_pipe_ranks: int
    cube_size: int

    def check(self, name: str, tensor: Any) -> None:
        """Check a call over the whole world.

        Raises:
            UnsupportedError: not all ranks call it, or some have no data of their own.
        """
        if not self.collectives.is_user_code or self.num_pipe_ranks * self.cube_size == 1 == self._num_data:
            return
        place = self.collectives.place
        if self.collectives.runs_on_all_ranks:
            if name in _REDUCING and self.num_pipe_ranks * self.cube_size > 1:
                raise UnsupportedError(
                    f"torch.distributed.{name} over all ranks in {place}: of {self.num_pipe_ranks * self.cube_size} "
                    f"ranks each, only one has data of its own, so that sums would count it several times. {_WAY_OUT}."
                )
        elif self.num_pipe_ranks > 1:
            raise UnsupportedError(
                f"torch.distributed.{name} over all ranks in {place}, which runs on pipeline rank 0 alone: the other "
                f"ranks would never call it. {_WAY_OUT}."
            )
        elif self.cube_size > 1:
            raise UnsupportedError(
                f"torch.distributed.{name} over all ranks in {place}: the ranks of a cube may have no samples of a "
                f"micro-batch, and don't count then. {_WAY_OUT}."
            )
        else:
            self.collectives.agree(f"torch.distributed.{name}", tensor)

    @property
    def _num_data(self) -> int:
        return dist.get_world_size() // (self.num_pipe_ranks * self.cube_size)


_running: list[Run] = []
_notes: list[Callable[[FrameType], None]] = []
_replaced: dict[str, tuple[FunctionType, CodeType, Callable[..., Any]]] = {}


def start(run: Run) -> None:
    """From now on, check what user code calls."""
    if not _running:
        for name in (*_REDUCING, *_OTHERS):
            _replace(name)
    _running.append(run)


def stop(run: Run) -> None:
    """End what `start` has begun. A second call does nothing."""
    if run in _running:
        _running.remove(run)
    if not _running:
        for function, code, _ in _replaced.values():
            function.__code__ = code
        _replaced.clear()


@contextmanager
def world_size_watched(note: Callable[[FrameType], None]) -> Iterator[None]:
    """Inside it, `note` gets the frame of each caller of `torch.distributed.get_world_size()`."""
    _replace(_SIZE)
    _notes.append(note)
    try:
        yield
    finally:
        _notes.remove(note)
        function, code, _ = _replaced.pop(_SIZE)
        function.__code__ = code


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call one of the functions. The code that takes the place of theirs calls this."""
    original = _replaced[name][2]
    if name == _SIZE:
        for note in _notes if {*args, *kwargs.values()} <= {None, dist.group.WORLD} else ():
            note(sys._getframe(2))  # the caller of the function whose code calls this
        return original(*args, **kwargs)
    for run in _running if distributed_c10d.is_initialized() else ():
        bound = _signature(original).bind(*args, **kwargs).arguments
        if bound.get("group") in (None, dist.group.WORLD):
            run.check(name, next((value for value in bound.values() if isinstance(value, Tensor)), None))
            with run.collectives.unchecked():  # the functions call each other
                return original(*args, **kwargs)
    return original(*args, **kwargs)


_signature = functools.cache(inspect.signature)


def _replace(name: str) -> None:
    function = inspect.unwrap(getattr(distributed_c10d, name))
    assert isinstance(function, FunctionType)
    code = function.__code__
    if not code.co_freevars:
        original = FunctionType(code, function.__globals__, name, function.__defaults__)
        original.__kwdefaults__ = function.__kwdefaults__
        _replaced[name] = function, code, original
        function.__code__ = _replacement.__code__.replace(co_name=name)


def _replacement(*args: Any, **kwargs: Any) -> Any:
    """Runs with the globals of the function whose code it replaces: so it imports what it needs."""
    import sys

    from lightning_hanayo.strategy.user_code.raw_collectives import call

    return call(sys._getframe().f_code.co_name, *args, **kwargs)

"""Ranks of a checkpoint's save as threads of one process: what one of them sends, the others get as it is."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from typing_extensions import override

from lightning_hanayo.dist_checkpointing.commit import RanksLost, SavingRanks

_T = TypeVar("_T")


class ThreadPeers(SavingRanks):
    """One of several threads that meet. `close` ends the others' waiting, as the end of a process does.

    Example:
        >>> on_ranks(2, lambda peers: peers.all_gather(peers.rank))
        [[0, 1], [0, 1]]
    """

    def __init__(self, rank: int, meeting: threading.Barrier, values: list[Any]) -> None:
        self.rank, self.num_ranks = rank, meeting.parties
        self._meeting, self._values = meeting, values

    @staticmethod
    def of_all(num_ranks: int) -> list["ThreadPeers"]:
        """The peers of all ranks, for one use at a time."""
        meeting, values = threading.Barrier(num_ranks, timeout=60), [None] * num_ranks
        return [ThreadPeers(rank, meeting, values) for rank in range(num_ranks)]

    @override
    def all_gather(self, value: Any) -> list[Any]:
        try:
            self._values[self.rank] = value
            self._meeting.wait()
            gathered = list(self._values)
            self._meeting.wait()
        except threading.BrokenBarrierError:
            raise RanksLost("a thread has ended") from None
        return gathered

    @override
    def gather(self, value: Any) -> list[Any]:
        gathered = self.all_gather(value)
        return gathered if self.rank == 0 else []

    @override
    def close(self) -> None:
        self._meeting.abort()


def on_ranks(num_ranks: int, function: Callable[[ThreadPeers], _T]) -> list[_T]:
    """The results of `function` on all ranks, each in a thread. An error of one ends the waiting of the others."""

    def run(peers: ThreadPeers) -> _T:
        try:
            return function(peers)
        except BaseException:
            peers.close()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, ThreadPeers.of_all(num_ranks)))


def errors_on_ranks(num_ranks: int, function: Callable[[ThreadPeers], object], kind: type[Exception]) -> list[str]:
    """The messages of the errors of this kind that `function` raises, on all ranks."""

    def run(peers: ThreadPeers) -> str:
        try:
            function(peers)
        except kind as error:
            return str(error)
        raise AssertionError(f"rank {peers.rank} raised no {kind.__name__}")

    return on_ranks(num_ranks, run)

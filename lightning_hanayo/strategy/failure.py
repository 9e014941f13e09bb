"""When a rank fails, it writes the cause to the store that all ranks share; the others end soon and quietly."""

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NoReturn

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.distributed_c10d import PrefixStore, Store, _abort_process_group, _get_default_store

from lightning_hanayo.errors import HanayoError, PeerFailed

_KEY = "hanayo/first_failure"
_RUNS, _POSITION = "hanayo/runs", "hanayo/position"
_ENDED = (1 << 62, 0, 0, 0)
_MISTAKES = (HanayoError, MisconfigurationException)
"""errors that the user can correct"""
POLL = 0.5
"""seconds between two looks for a failure elsewhere"""
GRACE = 5.0
"""seconds that a rank has to end by itself once another has failed; gloo wakes no rank whose peer is still alive"""


@dataclass(frozen=True)
class Failure:
    """The first failure: which rank, the cause, and the exit code of the ranks that end because of it."""

    rank: int
    cause: str
    code: int

    def follow(self) -> NoReturn:
        """End without a traceback.

        Raises:
            PeerFailed: always.
        """
        raise PeerFailed(f"rank {self.rank}: {self.cause}", self.code) from None


_left: dict[tuple[str, int], tuple[Store, int]] = {}
"""for the address of a rendezvous: the store that all ranks have there, and how many groups this process has left after
a failure. The process group belongs to the whole process, and so does this."""


def leave_group(address: tuple[str, int]) -> None:
    """After a failure: leave the process group without waiting for other ranks.

    The store stays: rank 0 serves it to the others, and the next group of these processes meets there, too. NCCL
    would wait for its kernels, of which some wait for other ranks, so all but gloo is aborted.
    """
    if dist.is_initialized():
        store, count = _left.get(address, (_get_default_store(), 0))
        _left.clear()
        _left[address] = store, count + 1
        leave = dist.destroy_process_group if dist.get_backend() == "gloo" else _abort_process_group
        leave()


def leave_at_exit() -> None:
    """When the process ends and nothing has failed: torch warns of NCCL groups that are still there."""
    if dist.is_initialized():
        dist.destroy_process_group()


def store_after_failure(address: tuple[str, int]) -> Store | None:
    """Where the next process group meets, apart from the keys of those before; None: as usual."""
    store, count = _left.get(address, (None, 0))
    return None if store is None else PrefixStore(f"hanayo/after_failure_{count}", store)


class Failures:
    """One rank's view of failures. Made after the process group; keeps the store open, so that others can read it.

    Args:
        rank: this process's.
        abort: called in a thread when another rank has failed: ends this rank's waiting for a GPU, whose kernels wait
            for that rank. gloo needs nothing: it ends transfers when a connection is closed.
    """

    def __init__(self, rank: int, abort: Callable[[], object]) -> None:
        self.rank = rank
        self._abort: Callable[[], object] | None = abort
        self.store = _get_default_store()  # the one rendezvous all ranks have; torch offers it under no public name
        self.run = self.store.add(f"{_RUNS}/{rank}", 1)
        self.position = (0, 0, 0, 0)
        """how far this rank is: it only grows; others can read it"""
        self._published: tuple[int, ...] = ()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True, name="hanayo-failure-watch")
        self._watch.start()

    def publish(self, error: BaseException) -> Failure:
        """Record that this rank fails with `error`; return the first failure of all ranks."""
        own = Failure(self.rank, f"{type(error).__name__}: {error}", 2 if isinstance(error, _MISTAKES) else 1)
        try:
            return _read(self.store.compare_set(_KEY, "", json.dumps(asdict(own))))
        except RuntimeError:  # rank 0 has ended, and the store with it
            return Failure(0, "its process ended", 1) if self.rank else own

    def on_transfer(self, error: Exception) -> NoReturn:
        """Called when a transfer failed: end quietly if another rank failed first, else record the error and raise it.

        Raises:
            PeerFailed: another rank failed first.
            RuntimeError: none did; the transfer's own error.
        """
        first = self.publish(error)
        if first.rank != self.rank:
            first.follow()
        raise error

    def explain(self, error: BaseException) -> None:
        """Record why this rank's run ends with `error`.

        Raises:
            PeerFailed: the error is a consequence of another rank's failure, which that rank shows.
        """
        if isinstance(error, PeerFailed):
            return
        first = self.publish(error)
        if first.rank != self.rank:
            first.follow()
        error.failed_first = True  # type: ignore[attr-defined]

    def check_peers(self) -> None:
        """Look whether another rank has failed.

        Raises:
            PeerFailed: one has.
        """
        if self.store.check([_KEY]):
            first = _read(self.store.get(_KEY))
            if first.rank != self.rank:
                first.follow()

    def position_of(self, rank: int) -> tuple[int, ...]:
        """How far another rank was, at most a second ago; () before it has begun this run."""
        key = f"{_POSITION}/{rank}/{self.run}"
        return tuple(json.loads(self.store.get(key))) if self.store.check([key]) else ()

    def stop(self) -> None:
        """Stop watching: the run has ended on this rank."""
        self.position = _ENDED
        self._over.set()
        self._watch.join()
        self._abort = None  # it holds the process groups

    def _publish_position(self) -> None:
        if self.position != self._published:
            self._published = self.position
            self.store.set(f"{_POSITION}/{self.rank}/{self.run}", json.dumps(self.position))

    def _look(self) -> None:
        try:
            while not self.store.check([_KEY]):
                self._publish_position()
                if self._over.wait(POLL):
                    self._publish_position()
                    return
            first = _read(self.store.get(_KEY))
        except RuntimeError:  # the store ended with rank 0; gloo's peers notice the closed connection, a GPU doesn't
            if not self._over.wait(GRACE):
                self._end_transfers()
            return
        if first.rank == self.rank or self._over.is_set():
            return
        self._end_transfers()
        if not self._over.wait(GRACE):
            late = f"rank {self.rank} did not end within {GRACE:g} s after rank {first.rank} failed; ending it"
            print(late, file=sys.stderr)
            os._exit(first.code)

    def _end_transfers(self) -> None:
        if self._abort is not None:
            self._abort()


def _read(stored: bytes) -> Failure:
    return Failure(**json.loads(bytes(stored)))

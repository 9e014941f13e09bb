"""The failure: the first rank to fail says why, in the store all ranks share; the others end quietly, and soon."""

import os
import sys
import threading
from typing import NoReturn

from torch.distributed.distributed_c10d import _get_default_store

from lightning_hanayo.errors import PeerFailed

_KEY = "hanayo/first_failure"
POLL = 0.5
"""seconds between two looks for a failure elsewhere"""
GRACE = 5.0
"""seconds that a rank gets to end by itself once another has failed; gloo wakes nobody whose peer still lives"""


class Failures:
    """One rank's view. Made after the process group; keeps the store open, so that others can still read it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = _get_default_store()  # the one rendezvous all ranks have; torch offers it under no public name
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True, name="hanayo-failure-watch")
        self._watch.start()

    def publish(self, error: BaseException) -> str:
        """Say that this rank fails with `error`; return the first failure of all, as "rank: cause"."""
        cause = f"{self._rank}: {type(error).__name__}: {error}"
        try:
            return bytes(self._store.compare_set(_KEY, "", cause)).decode()
        except RuntimeError:  # the store went with rank 0
            return "0: its process ended" if self._rank else cause

    def is_own(self, first: str) -> bool:
        """Whether the first failure is this rank's."""
        return first.startswith(f"{self._rank}:")

    def on_transfer(self, error: Exception) -> NoReturn:
        """A transfer failed: end quietly if another rank has said why, else say it and raise.

        Raises:
            PeerFailed: another rank failed first.
            RuntimeError: nobody did; the transfer's own error.
        """
        first = self.publish(error)
        if not self.is_own(first):
            raise PeerFailed(first) from None
        raise error

    def explain(self, error: BaseException) -> None:
        """Say why this rank's run ends with `error`.

        Raises:
            PeerFailed: the error only follows from another rank's failure, which that rank shows.
        """
        if not isinstance(error, PeerFailed):
            first = self.publish(error)
            if not self.is_own(first):
                raise PeerFailed(first) from None

    def stop(self) -> None:
        """The run is over for this rank: stop watching."""
        self._over.set()
        self._watch.join()

    def _look(self) -> None:
        try:
            while not self._store.check([_KEY]):
                if self._over.wait(POLL):
                    return
            first = self._store.get(_KEY).decode()
        except RuntimeError:  # the store went with rank 0; who still waits for rank 0 learns it from the connection
            return
        if not self.is_own(first) and not self._over.wait(GRACE):
            print(f"rank {self._rank} hung, and ends: rank {first.partition(':')[0]} failed first", file=sys.stderr)
            os._exit(1)

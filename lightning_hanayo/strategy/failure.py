"""The failure: the first rank to fail says why, in the store all ranks share; the others end quietly, and soon."""

import json
import os
import sys
import threading
from dataclasses import asdict, dataclass
from typing import NoReturn

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed.distributed_c10d import _get_default_store

from lightning_hanayo.errors import HanayoError, PeerFailed

_KEY = "hanayo/first_failure"
_MISTAKES = (HanayoError, MisconfigurationException)
"""what the user can mend"""
POLL = 0.5
"""seconds between two looks for a failure elsewhere"""
GRACE = 5.0
"""seconds that a rank gets to end by itself once another has failed; gloo wakes nobody whose peer still lives"""


@dataclass(frozen=True)
class Failure:
    """Which rank failed, of what, and with which exit code the ranks end that follow it."""

    rank: int
    cause: str
    code: int

    def follow(self) -> NoReturn:
        """End quietly.

        Raises:
            PeerFailed: always.
        """
        raise PeerFailed(f"rank {self.rank}: {self.cause}", self.code) from None


class Failures:
    """One rank's view. Made after the process group; keeps the store open, so that others can still read it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = _get_default_store()  # the one rendezvous all ranks have; torch offers it under no public name
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True, name="hanayo-failure-watch")
        self._watch.start()

    def publish(self, error: BaseException) -> Failure:
        """Say that this rank fails with `error`; return the first failure of all."""
        own = Failure(self._rank, f"{type(error).__name__}: {error}", 2 if isinstance(error, _MISTAKES) else 1)
        try:
            return _read(self._store.compare_set(_KEY, "", json.dumps(asdict(own))))
        except RuntimeError:  # the store went with rank 0
            return Failure(0, "its process ended", 1) if self._rank else own

    def on_transfer(self, error: Exception) -> NoReturn:
        """A transfer failed: end quietly if another rank has said why, else say it and raise.

        Raises:
            PeerFailed: another rank failed first.
            RuntimeError: nobody did; the transfer's own error.
        """
        first = self.publish(error)
        if first.rank != self._rank:
            first.follow()
        raise error

    def explain(self, error: BaseException) -> None:
        """Say why this rank's run ends with `error`.

        Raises:
            PeerFailed: the error only follows from another rank's failure, which that rank shows.
        """
        if isinstance(error, PeerFailed):
            return
        first = self.publish(error)
        if first.rank != self._rank:
            first.follow()
        error.first_of_all = True  # type: ignore[attr-defined]

    def stop(self) -> None:
        """The run is over for this rank: stop watching."""
        self._over.set()
        self._watch.join()

    def _look(self) -> None:
        try:
            while not self._store.check([_KEY]):
                if self._over.wait(POLL):
                    return
            first = _read(self._store.get(_KEY))
        except RuntimeError:  # the store went with rank 0; who still waits for rank 0 learns it from the connection
            return
        if first.rank != self._rank and not self._over.wait(GRACE):
            print(f"rank {self._rank} hung, and ends: rank {first.rank} failed first", file=sys.stderr)
            os._exit(first.code)


def _read(stored: bytes) -> Failure:
    return Failure(**json.loads(bytes(stored)))

"""The failure: the first rank to fail says why, in the store all ranks share; the others end quietly."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from typing import NoReturn

from lightning_hanayo.errors import PeerFailed

_KEY = "hanayo/first_failure"


class Failures:
    """One rank's view. Made after the process group; keeps the store open, so that others can still read it."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._store = _get_default_store()  # the one rendezvous all ranks have; torch offers it under no public name

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


def leave(failures: Failures | None, error: BaseException) -> None:
    """What a rank does when its run ends with `error`: publish it, and close its connections, which wakes its peers.

    Raises:
        PeerFailed: the error only follows from another rank's failure, which that rank shows.
    """
    if failures is None or isinstance(error, PeerFailed):
        return
    first = failures.publish(error)
    if not failures.is_own(first):
        raise PeerFailed(first) from None
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.destroy_process_group()

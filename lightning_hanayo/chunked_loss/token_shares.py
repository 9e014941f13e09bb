"""Which ranks share the tokens of a loss: those of a cube that all have the same samples, while a step runs."""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor


class _Pending(Protocol):
    def wait(self) -> Any:
        """Block until the collective has ended, and return its result."""


class TokenShares(Protocol):
    """The ranks, and collectives over them, which all of them call in the same order."""

    @property
    def size(self) -> int:
        """How many they are."""

    @property
    def rank(self) -> int:
        """This rank's number among them."""

    def all_gather(self, tensor: Tensor) -> _Pending:
        """[...] on each rank to [size, ...] on all of them."""

    def all_reduce(self, tensor: Tensor) -> _Pending:
        """The sum over all ranks. `tensor` is overwritten."""


_runs: list[Callable[[], TokenShares | None]] = []


def token_shares() -> TokenShares | None:
    """The ranks that share the tokens of a loss that is computed now; None if this rank computes all of it."""
    return next((shares for run in _runs if (shares := run()) is not None), None)


def start(run: Callable[[], TokenShares | None]) -> None:
    """From now on ask this run. It returns None where its user code doesn't run on all ranks alike."""
    _runs.append(run)


def stop(run: Callable[[], TokenShares | None]) -> None:
    """The run has ended. A second call does nothing."""
    if run in _runs:
        _runs.remove(run)

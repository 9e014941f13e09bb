"""Which ranks share the tokens of a loss: those of a cube that all have the same samples, while a step runs."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_hanayo.tensor_parallel.mesh import MeshAxis

FindShares = Callable[[], "MeshAxis | None"]

_runs: list[FindShares] = []


def token_shares() -> "MeshAxis | None":
    """The ranks that share the tokens of a loss that is computed now; None if this rank computes all of it."""
    return next((shares for run in _runs if (shares := run()) is not None), None)


def start(run: FindShares) -> None:
    """From now on ask this run. It returns None where its user code doesn't run on all ranks alike."""
    _runs.append(run)


def stop(run: FindShares) -> None:
    """The run has ended. A second call does nothing."""
    if run in _runs:
        _runs.remove(run)

"""Which ranks share a loss: those of a cube that all have the same samples, while a step runs.

They share its tokens, and each computes with all rows of the head's weight; or the rows, for all tokens.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

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


@dataclass(frozen=True)
class OwnRows:
    """This rank's rows of a weight [size, H] of the vocabulary, of which each of the `ranks` holds some."""

    ranks: "MeshAxis"
    part: Tensor
    """[num_rows, H], a leaf"""
    start: int
    num_rows: int
    size: int

    def find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The row of each id here, 0 for those that other ranks hold; and whether this rank holds it."""
        torch._assert_async(((ids >= 0) & (ids < self.size)).all(), "an id is outside of the vocabulary")
        rows = ids - self.start
        is_own = (rows >= 0) & (rows < self.num_rows)
        return rows.where(is_own, 0), is_own

    def look_up(self, ids: Tensor, padding_idx: int | None) -> Tensor:
        """Ids [...] to [..., H]: zeros for rows that other ranks hold. `padding_idx` as in `F.embedding`."""
        own, is_own = self.find(ids)
        padding = -1 if padding_idx is None else padding_idx - self.start
        table = self.part if self.num_rows else functional.pad(self.part, (0, 0, 0, 1))
        found = functional.embedding(own, table, padding if 0 <= padding < self.num_rows else None)
        return found.masked_fill_(~is_own.unsqueeze(-1), 0)


class HeldByRows:
    """A weight of the vocabulary whose rows ranks may share."""

    @abstractmethod
    def own_rows(self) -> OwnRows | None:
        """This rank's; None while it holds all of them."""

    @abstractmethod
    def kept(self) -> Tensor:
        """The same weight for code that runs later, also where the parameter's class is that of a plain one."""

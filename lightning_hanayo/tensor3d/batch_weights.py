"""What the products of one stage keep for all micro-batches of a batch: gathered weights, and sums of their gradients.

    first forward       gathers each weight
    from then on        products use what it has gathered
    each backward       adds its gradients of the gathered weights to this rank's sums
    the last one        reduce-scatters the sums

Without it, each micro-batch gathers its weights, and reduce-scatters their gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lightning_hanayo.overlap.turns import DeviceTurns
from lightning_hanayo.tensor3d.mesh import Pending


class Weight(Protocol):
    """What a batch needs to know of a weight."""

    @property
    def versions(self) -> tuple[int, ...]:
        """Of the parameters: others after each change."""

    @property
    def is_gathered(self) -> bool:
        """Whether the matrices are gathered from several ranks."""

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which the gradients of several micro-batches are added up."""


W = TypeVar("W", bound=Weight)


@dataclass
class GradientSum:
    """This rank's gradients of a weight's gathered matrices, and whether each of its parameters has any."""

    matrices: list[Tensor]
    trained: list[bool]


class BatchWeights(Generic[W]):
    """Of one stage. All ranks of the cube keep the same, since they run the same actions.

    Args:
        is_on: whether anything is kept.
        turns: which of two actions runs now.
    """

    def __init__(self, is_on: bool = False, turns: DeviceTurns | None = None) -> None:
        self.is_on = is_on
        self._is_open = False
        self._turns = DeviceTurns() if turns is None else turns
        self._gathered: dict[tuple[W, torch.dtype], tuple[Sequence[int], Pending[list[Tensor]]]] = {}
        """with the versions of the parameters that were gathered"""
        self._sums: dict[W, GradientSum] = {}
        self._last: tuple[int, int] | None = None
        """the action whose gradients are the last ones"""

    @property
    def is_open(self) -> bool:
        """Whether a batch runs that keeps weights."""
        return self._is_open

    def begin_batch(self) -> None:
        """Forget what a failure in the batch before may have left."""
        self.end_batch()
        self._is_open = self.is_on

    def end_batch(self) -> None:
        """Free what is kept: the optimizer changes the weights now."""
        self._is_open, self._last = False, None
        self._gathered.clear()
        self._sums.clear()

    def keeps(self, weight: W) -> bool:
        """Whether micro-batches share its gathered matrices, and add up their gradients before ranks do."""
        return self._is_open and weight.is_gathered

    def gathered(self, weight: W, dtype: torch.dtype) -> Pending[list[Tensor]] | None:
        """The matrices, if an earlier product has gathered them and the parameters haven't changed since."""
        versions, pending = self._gathered.get((weight, dtype), ((), None))
        return pending if versions == weight.versions else None

    def keep(self, weight: W, dtype: torch.dtype, matrices: Pending[list[Tensor]]) -> None:
        """Keep what a product gathers, until the batch ends."""
        if self.keeps(weight):
            self._gathered[weight, dtype] = weight.versions, matrices

    @property
    def tensors(self) -> list[Tensor]:
        """All that is kept now. Waits for what is under way."""
        gathered = [matrix for _, pending in self._gathered.values() for matrix in pending.wait()]
        return gathered + [matrix for total in self._sums.values() for matrix in total.matrices]

    @property
    def has_gathered(self) -> bool:
        """Whether a forward of this batch has gathered weights."""
        return bool(self._gathered)

    def expect_last(self) -> None:
        """The action that begins now makes the last gradients."""
        self._last = self._action

    def add(self, weight: W, gradients: Sequence[Tensor], trained: Sequence[bool]) -> GradientSum | None:
        """Add a micro-batch's gradients of the matrices. Returns what is to be reduce-scattered now, if anything is."""
        if not self.keeps(weight):
            return GradientSum(list(gradients), list(trained))
        before, dtype = self._sums.pop(weight, None), weight.gradient_dtype
        own = [gradient.to(dtype) for gradient in gradients]
        if before is not None:
            own = [total.add_(one) for total, one in zip(before.matrices, own, strict=True)]
            trained = [a or b for a, b in zip(before.trained, trained, strict=True)]
        made = GradientSum(own, list(trained))
        if self._last == self._action:
            return made
        self._sums[weight] = made
        return None

    def take_sums(self) -> dict[W, GradientSum]:
        """The sums that no action has reduce-scattered."""
        sums, self._sums, self._last = self._sums, {}, None
        return sums

    @property
    def _action(self) -> tuple[int, int]:
        return self._turns.number, self._turns.slot

"""The gate: what stands between the user's code and the blocks where the ranks of a cube hold a stage together.

outside    each rank's share of the micro-batch, features whole        user code, losses, logs
inside     shards, the same samples for all ranks that share them      blocks

The runtime knows this protocol; whoever spreads the blocks over a cube implements it.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

from torch import Tensor


class BoundaryReshard(Protocol):
    """Passed by all ranks of a cube together, in the main thread, in the same order."""

    def admit(
        self, microbatch: int, tensors: Sequence[Tensor], streams: Collection[int], structure: Hashable
    ) -> list[Tensor] | None:
        """The arguments of blocks as they are inside.

        Args:
            microbatch: whose they are.
            tensors: as they are outside.
            streams: which of them are residual streams; the others hold something for each sample, or for all.
            structure: what must be the same on all ranks. Where it isn't, None is returned, on all of them.
        """

    def admit_streams(self, microbatch: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As `admit`, of residual streams alone."""

    def release(self, microbatch: int, tensor: Tensor) -> Tensor:
        """The output of the stack as it is outside."""

    def note(self, microbatch: int) -> int:
        """What all stages are told about a micro-batch that has been admitted."""


class StageHooks(Protocol):
    """What the blocks of a stage find around them: told before each of the stage's runs."""

    def begin_batch(self) -> None:
        """A batch begins."""

    def before_forward(self, microbatch: int, note: int) -> None:
        """The stage's blocks run next; `note` is the gate's."""

    def before_backward(self, microbatch: int) -> None:
        """Their backward runs next."""


class NoHooks:
    """StageHooks of stages that lie on one rank each."""

    def begin_batch(self) -> None:
        """NoHooks to prepare."""

    def before_forward(self, microbatch: int, note: int) -> None:
        """NoHooks to prepare."""

    def before_backward(self, microbatch: int) -> None:
        """NoHooks to prepare."""

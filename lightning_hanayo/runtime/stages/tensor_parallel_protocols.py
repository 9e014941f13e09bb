"""Protocols of tensor parallelism: what the stages need from the code that shards the blocks over several ranks.

outside the stack    each rank has its own samples, with all features       user code, losses, logs
inside               shards; the ranks that share samples work together     blocks

`tensor3d` implements both protocols. Stages on one rank each use `NoHooks`, and no `BoundaryReshard`.
"""

from collections.abc import Collection, Hashable, Sequence
from typing import Protocol

from torch import Tensor


class BoundaryReshard(Protocol):
    """Converts tensors at the stack's boundary. All ranks of a cube call it in the main thread, in the same order."""

    def shard_arguments(
        self, microbatch: int, tensors: Sequence[Tensor], streams: Collection[int], structure: Hashable
    ) -> list[Tensor] | None:
        """Convert the arguments of blocks to the layout inside the stack.

        `streams` are the indices of the residual streams; the others have a row for each sample, or serve all samples.
        Returns None on all ranks if `structure`, a description of the arguments, or a shape differs between ranks.
        """

    def shard_streams(self, microbatch: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Convert residual streams to the layout inside the stack."""

    def agrees(self, microbatch: int, value: Hashable) -> bool:
        """Whether all ranks that share samples have the same value."""

    def unshard_output(self, microbatch: int, tensor: Tensor) -> Tensor:
        """Convert the output of the stack to the layout outside."""

    def sequence_length(self, microbatch: int) -> int:
        """Returns the length of the whole sequences, once they are sharded; 0 if the blocks do not use it."""


class StageHooks(Protocol):
    """Called before each forward and backward of a stage's blocks, and around batches."""

    def begin_batch(self) -> None:
        """Called when a batch begins."""

    @property
    def allows_twins(self) -> bool:
        """Whether two forwards, or two backwards, of the stage may run at once now."""

    @property
    def keeps_weights(self) -> bool:
        """Whether layers gather their weights once a batch, so that its first and last actions do what others don't."""

    @property
    def kept(self) -> Sequence[Tensor]:
        """What layers keep for later micro-batches of the batch."""

    def expect_last_gradients(self) -> None:
        """Called before the stage's action that makes its last weight gradients."""

    def finish_gradients(self) -> None:
        """Called when the stage's last weight gradient has been made: sums that are under way must end."""

    def end_batch(self) -> None:
        """Called when a batch has ended."""

    def before_forward(self, sequence_length: int) -> None:
        """Called before a forward of the blocks on a micro-batch, whose whole sequences have that length."""

    def before_backward(self, sequence_length: int) -> None:
        """Called before the backward of a micro-batch, with the length that its forward had."""


class NoHooks:
    """The hooks of a stage on a single rank: they do nothing."""

    def begin_batch(self) -> None:
        """Do nothing."""

    allows_twins = True
    keeps_weights = False
    kept: Sequence[Tensor] = ()
    expect_last_gradients = finish_gradients = end_batch = begin_batch

    def before_forward(self, sequence_length: int) -> None:
        """Do nothing."""

    before_backward = before_forward

"""The passage: micro-batches on their way through the gate, and what the ranks must know of each other for it."""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from torch import Tensor

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor3d.boundary.reshard import ReplicatedReshard, Reshard
from lightning_hanayo.tensor3d.boundary.shares import Share, row_of

Agree = Callable[[Any], list[Any]]
"""Called by all ranks of a plane with something picklable: what each of them has, in rank order."""


class Admission:
    """One rank's. `begin` a batch with its shares, then admit and release its micro-batches.

    Args:
        gate: how tensors pass.
        agree: among the ranks of this one's (y, z) plane.
    """

    def __init__(self, gate: Reshard, agree: Agree) -> None:
        self._gate = gate
        self._agree = agree
        self._shares: Sequence[Sequence[Share]] = ()
        self._lengths: dict[int, int] = {}

    def begin(self, shares: Sequence[Sequence[Share]]) -> None:
        """A batch whose micro-batches are shared out so: for each, the share of every rank of the cube."""
        self._shares = shares
        self._lengths.clear()

    def shard_arguments(
        self, microbatch: int, tensors: Sequence[Tensor], streams: Collection[int], structure: Hashable
    ) -> list[Tensor] | None:
        """See `runtime.gate.Gate`."""
        if self._gate.residual is None and not isinstance(self._gate, ReplicatedReshard):
            return list(tensors)
        batched = self._batched(microbatch, tensors, streams, structure)
        if batched is None:
            return None
        inside = self.shard_streams(microbatch, [tensors[i] for i in streams])
        where = dict(zip(streams, inside, strict=True))
        shares = self._shares[microbatch]
        return [
            where[i] if i in where else self._gate.argument_in(tensor, shares, is_batch=batched[i])
            for i, tensor in enumerate(tensors)
        ]

    def shard_streams(self, microbatch: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """See `runtime.gate.Gate`."""
        residual = self._gate.residual
        for i, tensor in enumerate(tensors if residual is not None else ()):
            assert residual is not None
            length = tensor.shape[residual.sequence_dim]
            if i == 0:
                self._lengths[microbatch] = length
            elif length % self._gate.grid.size("y"):
                raise UnsupportedError(
                    f"the memory of a decoder has {length} positions, which don't divide over y = "
                    f"{self._gate.grid.size('y')} ranks of the cube. Pad it, with a mask, or take y = 1."
                )
        return [self._gate.stream_in(tensor, self._shares[microbatch]) for tensor in tensors]

    def unshard_output(self, microbatch: int, tensor: Tensor) -> Tensor:
        """See `runtime.gate.Gate`."""
        return self._gate.stream_out(tensor, self._shares[microbatch], self.sequence_length(microbatch))

    def sequence_length(self, microbatch: int) -> int:
        """The length of its sequences; 0 where nobody asks."""
        return self._lengths.get(microbatch, 0)

    def _batched(
        self, microbatch: int, tensors: Sequence[Tensor], streams: Collection[int], structure: Hashable
    ) -> list[bool] | None:
        """Which tensors hold something for each sample: as long as the share, on all ranks. None if they differ."""
        shares = self._shares[microbatch]
        if isinstance(self._gate, ReplicatedReshard):
            samples = sum(share.size for share in shares if not share.is_ghost)
            return [tensor.dim() > 0 and len(tensor) == samples for tensor in tensors]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        everybody = self._agree((structure, shapes))
        sizes = [share.size for share in row_of(tuple(shares), self._gate.grid)]
        if any(other[0] != structure for other in everybody):
            self._check_lengths(everybody, streams)
            return None
        batched = [
            all(shapes[i][:1] == (size,) for (_, shapes), size in zip(everybody, sizes, strict=True))
            for i in range(len(tensors))
        ]
        alike = all(
            shapes[i][1:] == other[i][1:] if batched[i] else shapes[i] == other[i]
            for _, other in everybody
            for i in range(len(tensors))
            if i not in streams
        )
        self._check_lengths(everybody, streams)
        return batched if alike else None

    def _check_lengths(self, everybody: list[Any], streams: Collection[int]) -> None:
        """Residual streams have one length on all ranks.

        Raises:
            HanayoError: code before the stack cuts them by what its own samples need.
        """
        residual = self._gate.residual
        assert residual is not None
        for i in streams:
            lengths = {shapes[i][residual.sequence_dim] for _, shapes in everybody if i < len(shapes)}
            if len(lengths) > 1:
                raise HanayoError(
                    f"samples of one micro-batch reach the stack with sequences of {sorted(lengths)} positions on "
                    f"different ranks of the cube; pad them alike, or set cube_outside='replicate'."
                )

"""Reshards the micro-batches of a batch: implements the runtime's `BoundaryReshard` for the ranks of a cube."""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor3d.boundary.reshard import ReplicatedReshard, Reshard
from lightning_hanayo.tensor3d.boundary.sample_shares import Share, block_shares
from lightning_hanayo.tensor3d.boundary.sample_shares import shares as sample_shares

AllGatherObject = Callable[[Any], list[Any]]
"""called by all ranks of a group, each with a picklable object; returns the objects of all, in rank order"""


class MicrobatchReshard:
    """One rank's. Call `begin` with the shares of a batch, then convert the tensors of its micro-batches.

    `all_gather_object` gathers over the ranks of this rank's (y, z) plane.
    """

    def __init__(self, reshard: Reshard, all_gather_object: AllGatherObject) -> None:
        self._reshard = reshard
        self._all_gather_object = all_gather_object
        self._shares: list[Sequence[Share]] = []
        self._lengths: dict[int, int] = {}
        self._compared: set[tuple[int, tuple[int, ...]]] = set()
        """arguments that are the same for all samples, by place and shape, whose values were compared"""

    def begin(self, shares: Sequence[Sequence[Share]]) -> None:
        """Begin a batch: for each micro-batch, the share of every rank of the cube."""
        self._shares = list(shares)
        self._lengths.clear()

    def shard_arguments(
        self, microbatch: int, tensors: Sequence[Tensor], streams: Collection[int], structure: Hashable
    ) -> list[Tensor] | None:
        """Reshard the arguments of blocks. Returns None, on all ranks, where their structures or shapes differ."""
        if self._reshard.stream_dims is None and not isinstance(self._reshard, ReplicatedReshard):
            return list(tensors)
        is_batch = self._find_batch_tensors(microbatch, tensors, streams, structure)
        if is_batch is None:
            return None
        resharded = dict(zip(streams, self.shard_streams(microbatch, [tensors[i] for i in streams]), strict=True))
        shares = self._shares[microbatch]
        return [
            resharded[i] if i in resharded else self._reshard.argument_in(tensor, shares, is_batch=is_batch[i])
            for i, tensor in enumerate(tensors)
        ]

    def shard_streams(self, microbatch: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reshard residual streams alone. The first one sets the micro-batch's sequence length.

        Raises:
            UnsupportedError: y doesn't divide another one's length.
        """
        dims = self._reshard.stream_dims
        lengths = [] if dims is None else [tensor.shape[dims.sequence_dim] for tensor in tensors]
        for i, length in enumerate(lengths):
            if i == 0:
                self._lengths[microbatch] = length
            elif length % self._reshard.mesh.size("y"):
                raise UnsupportedError(
                    f"the memory of a decoder has {length} positions, which don't divide over y = "
                    f"{self._reshard.mesh.size('y')} ranks of the cube. Pad it, with a mask, or take y = 1."
                )
        return [self._reshard.stream_in(tensor, self._shares[microbatch]) for tensor in tensors]

    def agrees(self, microbatch: int, value: Hashable) -> bool:
        """Returns whether all ranks that share samples have the same value."""
        return all(other == value for other in self._all_gather_object(value))

    def unshard_output(self, microbatch: int, tensor: Tensor) -> Tensor:
        """Reshard the output of the stack for the user's code."""
        return self._reshard.stream_out(tensor, self._shares[microbatch], self.sequence_length(microbatch))

    def sequence_length(self, microbatch: int) -> int:
        """Returns the length of the micro-batch's sequences; 0 if the blocks don't need it."""
        return self._lengths.get(microbatch, 0)

    def _find_batch_tensors(
        self, microbatch: int, tensors: Sequence[Tensor], streams: Collection[int], structure: Hashable
    ) -> list[bool] | None:
        """Returns which tensors have something for each sample: as long as the share on all ranks.

        None if structures or shapes differ between ranks.

        Raises:
            HanayoError: lengths of streams differ between ranks.
            UnsupportedError: which streams have a gradient does, or values of an argument that has no samples.
        """
        shares, dims = self._shares[microbatch], self._reshard.stream_dims
        if isinstance(self._reshard, ReplicatedReshard):
            if dims is not None and streams:
                rows = tensors[next(iter(streams))].shape[dims.batch_dim]
                shares = self._shares[microbatch] = sample_shares(rows, self._reshard.mesh.sizes)
            return [self._reshard.sample_dim(tensor, shares) is not None for tensor in tensors]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        of_streams = [(shapes[i], tensors[i].requires_grad) for i in streams]
        gathered = self._all_gather_object((structure, shapes, of_streams))
        self._check_streams([other for *_, other in gathered])
        if any(other[0] != structure for other in gathered):
            return None
        of_all_ranks = [other for _, other, _ in gathered]
        if streams:
            shares = self._shares[microbatch] = self._as_counted(shares, of_all_ranks, next(iter(streams)))
        sizes = [share.size for share in block_shares(tuple(shares), self._reshard.mesh)]
        is_batch = [
            all(other[i][:1] == (size,) for other, size in zip(of_all_ranks, sizes, strict=True))
            for i in range(len(tensors))
        ]
        agree = all(
            shapes[i][1:] == other[i][1:] if is_batch[i] else shapes[i] == other[i]
            for other in of_all_ranks
            for i in range(len(tensors))
            if i not in streams
        )
        if not agree:
            return None
        self._check_values({i: x for i, x in enumerate(tensors) if i not in streams and not is_batch[i]})
        return is_batch

    def _check_values(self, arguments: Mapping[int, Tensor]) -> None:
        """Check once for each shape that arguments without samples are the same on all ranks of the plane.

        Raises:
            UnsupportedError: they aren't: blocks would use one rank's for the samples of all.
        """
        new = {i: x for i, x in arguments.items() if (i, tuple(x.shape)) not in self._compared}
        if not new or self._reshard.mesh.size("yz") == 1:
            return
        self._compared.update((i, tuple(x.shape)) for i, x in new.items())
        own = [_digest(x) for x in new.values()]
        for others in self._all_gather_object(own):
            for i, one, other in zip(new, own, others, strict=True):
                if one != other:
                    raise UnsupportedError(
                        f"an argument of the blocks, of the shape {tuple(new[i].shape)}, has other values on other "
                        f"ranks of the cube, which have other samples, but no row for each sample. Give it the samples "
                        f"as dimension 0, or set cube_outside='replicate'."
                    )

    def _as_counted(self, shares: Sequence[Share], of_all_ranks: list[Any], stream: int) -> Sequence[Share]:
        """Returns the shares with as many rows as the residual stream has on each rank of this rank's plane.

        They differ from the samples where the user's code makes several rows of one sample.
        """
        dims = self._reshard.stream_dims
        assert dims is not None
        per_x = self._reshard.mesh.size("yz")
        first = self._reshard.mesh.index("x") * per_x
        counted = list(shares)
        for rank, shapes in enumerate(of_all_ranks):
            old = counted[first + rank]
            counted[first + rank] = replace(old, stop=old.start + shapes[stream][dims.batch_dim])
        return counted

    def _check_streams(self, of_all_ranks: list[Any]) -> None:
        """Check that residual streams have one length on all ranks, and a gradient on all or none.

        Raises:
            HanayoError: code before the stack cuts them to what its own samples need.
            UnsupportedError: only some ranks would take part in the backward's collectives.
        """
        dims = self._reshard.stream_dims
        assert dims is not None
        for one in zip(*of_all_ranks, strict=False):
            if len({has_gradient for _, has_gradient in one}) > 1:
                raise UnsupportedError(
                    "what the blocks get has a gradient on some ranks of the cube, and none on others, whose samples "
                    "differ: code before the stack runs a trained module for some samples only. Run it for all (0 * "
                    "module(x) for the others), or set cube_outside='replicate'."
                )
            lengths = {shape[dims.sequence_dim] for shape, _ in one}
            if len(lengths) > 1:
                raise HanayoError(
                    f"samples of one micro-batch reach the stack with sequences of {sorted(lengths)} positions on "
                    f"different ranks of the cube; pad them alike, or set cube_outside='replicate'."
                )


def _digest(x: Tensor) -> bytes:
    """Tells other values from these; the host waits for the device."""
    return blake2b(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), digest_size=8).digest()

"""Reshards tensors at the ends of the stack, between the layout of the user's code and the 3-D layout of the blocks.

outside      [own samples, seq, h]            each rank has its share of the micro-batch, with all features
in blocks    [samples of x, seq/y, h/z]       the residual stream; masks and tables are [samples of x, ...]

One all-to-all over the (y, z) plane each way. Shares of different sizes are padded to the largest before it.
First and last stages call a `MicrobatchReshard`, in the main thread.
"""

import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hanayo.divisibility import MeshSizes
from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.tensor_parallel import collectives
from lightning_hanayo.tensor_parallel.mesh import Mesh, MeshAxis
from lightning_hanayo.tensor_parallel.product import SequenceParts, sequence_parts


@dataclass(frozen=True)
class Share:
    """Samples `start` to `stop`, which isn't one of them, of a micro-batch. A padding sample doesn't count."""

    start: int
    stop: int
    is_padding: bool = False

    @property
    def size(self) -> int:
        """How many samples the rank runs."""
        return self.stop - self.start


def sample_shares(num_samples: int, sizes: MeshSizes) -> tuple[Share, ...]:
    """Returns the samples of a micro-batch that each rank of the cube works on outside the stack, in rank order.

        11 samples, mesh (2, 2, 2):     x = 0: 6 = 2 + 2 + 1 + 1        x = 1: 5 = 2 + 1 + 1 + 1
         2 samples                      x = 0: 1 = 1 + 0 + 0 + 0        x = 1: 1 = 1 + 0 + 0 + 0

    A rank without a sample gets the micro-batch's first one as a padding sample: it runs the same code, but its results
    don't count.
    """
    per_x = sizes[1] * sizes[2]
    return tuple(
        Share(start, stop) if stop > start else Share(0, 1, is_padding=True)
        for of_x in _even_parts(0, num_samples, sizes[0])
        for start, stop in _even_parts(*of_x, per_x)
    )


def block_shares(all_shares: tuple[Share, ...], mesh: Mesh) -> tuple[Share, ...]:
    """Returns the shares that this rank's blocks work on: those of all ranks with this rank's x."""
    per_x = mesh.size("yz")
    first = mesh.index("x") * per_x
    return all_shares[first : first + per_x]


def _even_parts(start: int, stop: int, count: int) -> list[tuple[int, int]]:
    """`count` contiguous parts, whose sizes differ by at most one, larger ones first."""
    size, extra = divmod(stop - start, count)
    edges = [start + i * size + min(i, extra) for i in range(count + 1)]
    return list(zip(edges, edges[1:], strict=False))


@dataclass(eq=False)
class _Reshard:
    mesh: Mesh
    has_streams: bool = True
    """whether blocks are registered, and read and write residual streams; generic ones keep the layout outside"""
    batch_dim: int = 0
    """the dimension of the samples in residual streams, or in generic blocks' tensors that have it"""
    sequence_dim: int = 1
    """of residual streams"""

    def __post_init__(self) -> None:
        self._plane = self.mesh.axis("yz")


class SharedReshard(_Reshard):
    """How tensors are resharded where each rank works on its own share outside.

    All ranks of the cube call its methods together, in the main thread.
    """

    def stream_in(self, x: Tensor, shares: Sequence[Share]) -> Tensor:
        """Reshard a residual stream for the blocks."""
        sizes = self._sizes(shares)
        parts = collectives.padded(x, self.batch_dim, max(sizes)).unsqueeze(0)
        for axis, dim in (("z", -1), ("y", self.sequence_dim + 1)):  # [1, ..] to [y z, .., seq/y, .., h/z]
            parts = collectives.split_dim(parts, self.mesh.size(axis), dim).flatten(0, 1)
        return _join_valid(collectives.all_to_all(parts, self._plane), self.batch_dim, sizes)

    def stream_out(self, x: Tensor, shares: Sequence[Share], sequence_length: int) -> Tensor:
        """Reshard a residual stream of `sequence_length` positions for the code behind the blocks."""
        batch, sequence, sizes = self.batch_dim, self.sequence_dim, self._sizes(shares)
        parts = torch.stack([collectives.padded(rows, batch, max(sizes)) for rows in x.split(sizes, batch)])
        received = collectives.all_to_all(parts, self._plane).unflatten(0, (self.mesh.size("y"), self.mesh.size("z")))
        whole = received.movedim(0, sequence + 1).flatten(sequence + 1, sequence + 2)  # [z, .., seq, .., h/z]
        whole = whole.movedim(0, -2).flatten(-2)
        own: Tensor = whole.narrow(sequence, 0, sequence_length).narrow(batch, 0, sizes[self._plane.rank])
        return own

    def argument_in(self, x: Tensor, shares: Sequence[Share], *, is_batch: bool) -> Tensor:
        """Reshard another argument of a block, which has something for each sample, or is the same for all."""
        if not is_batch or self._plane.size == 1:
            return x
        sizes = self._sizes(shares)
        plane = self.mesh.unqueued_axis("yz")  # masks, for instance, come only with samples that need them
        parts = collectives.all_gather(collectives.padded(x, 0, max(sizes)).unsqueeze(0), plane, 0)
        return _join_valid(parts, 0, sizes)

    def _sizes(self, shares: Sequence[Share]) -> list[int]:
        """How many samples each rank of the plane has."""
        return [share.size for share in block_shares(tuple(shares), self.mesh)]


class ReplicatedReshard(_Reshard):
    """The same where all ranks work on the whole micro-batch outside: for the blocks each keeps its part of it.

    The losses of all ranks add up to that of the micro-batch, so that gradients outside are parts of a sum, too.
    """

    def stream_in(self, x: Tensor, shares: Sequence[Share]) -> Tensor:
        """Reshard a residual stream for the blocks."""
        x = self.rows_in(x, shares, self.batch_dim)
        for axis, dim in ((self.mesh.axis("y"), self.sequence_dim), (self.mesh.axis("z"), -1)):
            x = collectives.split_dim(x, axis.size, dim)[axis.rank]
        return x

    def stream_out(self, x: Tensor, shares: Sequence[Share], sequence_length: int) -> Tensor:
        """Reshard a residual stream of `sequence_length` positions for the code behind the blocks."""
        x = collectives.all_gather(x, self.mesh.axis("z"), -1)
        x = collectives.all_gather(x, self.mesh.axis("y"), self.sequence_dim)
        return self.rows_out(x.narrow(self.sequence_dim, 0, sequence_length), shares, self.batch_dim)

    def argument_in(self, x: Tensor, shares: Sequence[Share], *, is_batch: bool) -> Tensor:
        """Reshard another argument of a block, which has something for each sample, or is the same for all."""
        return self.rows_in(x, shares, self.sample_dim(x, shares) or 0) if is_batch else x

    def sample_dim(self, x: Tensor, shares: Sequence[Share]) -> int | None:
        """Returns the dimension in which a block's argument has an entry for each sample of the micro-batch."""
        samples = _num_samples(shares)
        dims = (0,) if self.has_streams else (self.batch_dim, 0)
        return next((dim for dim in dims if dim < x.dim() and x.shape[dim] == samples), None)

    def rows_in(self, x: Tensor, shares: Sequence[Share], dim: int) -> Tensor:
        """Returns the samples that this rank's blocks work on, or a padding sample if there is none."""
        own = self._of_ranks(shares)[self._samples.rank]
        rows = x.narrow(dim, own[0].start, max(_num_samples(own), 1))
        return rows.clone(memory_format=torch.contiguous_format)

    def rows_out(self, x: Tensor, shares: Sequence[Share], dim: int) -> Tensor:
        """Returns the whole micro-batch in its order, without padding samples."""
        sizes = list(map(_num_samples, self._of_ranks(shares)))
        x = collectives.padded(x, dim, max(sizes))
        return _join_valid(collectives.all_gather(x.unsqueeze(0), self._samples, 0), dim, sizes)

    def mean_out(self, x: Tensor, shares: Sequence[Share]) -> Tensor:
        """What blocks return or store for each rank's samples together: the mean over samples."""
        rows = collectives.all_gather(x.unsqueeze(0), self.mesh.axis("xyz"), 0)
        weights = [_num_samples([share]) / _num_samples(shares) for share in shares]
        return torch.stack([row * weight for row, weight in zip(rows, weights, strict=True)]).sum(0)

    @property
    def _samples(self) -> MeshAxis:
        """The axis that the blocks' samples are cut along."""
        return self.mesh.axis("x" if self.has_streams else "xyz")

    def _of_ranks(self, shares: Sequence[Share]) -> list[Sequence[Share]]:
        """The shares of each of its ranks, whose samples lie one behind the other."""
        count = len(shares) // self._samples.size
        return [shares[i : i + count] for i in range(0, len(shares), count)]


def _digest(x: Tensor) -> bytes:
    """Of its values. Waits for the device."""
    values = x.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return blake2b(values.numpy().tobytes(), digest_size=8).digest()


def _num_samples(shares: Sequence[Share]) -> int:
    """How many samples of a micro-batch are in these shares."""
    return sum(share.size for share in shares if not share.is_padding)


def _join_valid(parts: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """[ranks, .., largest, ..] joined along `dim`, without padding."""
    if all(size == parts.shape[dim + 1] for size in sizes):
        return parts.movedim(0, dim).flatten(dim, dim + 1)
    return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)


Named = tuple[Sequence[int], Sequence[int]]
"""the numbers of residual streams among blocks' arguments, and of tensors that are the same for all samples"""

Dims = Sequence[int | None]
"""the dimension of each tensor that grows with the samples"""

AllGatherObject = Callable[[Any], list[Any]]
"""called by all ranks of a group, each with a picklable object; returns the objects of all, in rank order"""


@dataclass(frozen=True)
class Rows:
    """In which dimension a tensor of generic blocks has rows of samples, and the share of every rank in them."""

    dim: int
    shares: tuple[Share, ...]
    length: int = 1
    """rows of each sample: blocks may flatten the next dimension into this one"""

    def fit(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Whether a tensor that has these shapes on the ranks has these rows."""
        return all(
            self.dim < len(shape) and shape[self.dim] == share.size * self.length
            for shape, share in zip(shapes, self.shares, strict=True)
        )


@dataclass(eq=False)
class MicrobatchReshard:
    """One rank's. Call `begin` with the shares of a batch, then convert the tensors of its micro-batches.

    `all_gather_object` gathers over the ranks of this rank's (y, z) plane, `all_gather_in_cube` over all.
    """

    reshard: SharedReshard | ReplicatedReshard
    all_gather_object: AllGatherObject
    all_gather_in_cube: AllGatherObject
    _shares: list[Sequence[Share]] = field(default_factory=list, init=False)
    _rows: dict[int, list[Rows]] = field(default_factory=dict, init=False)
    """by micro-batch: of generic blocks' arguments"""
    _whole: dict[int, list[Tensor]] = field(default_factory=dict, init=False)
    """by micro-batch: those of their arguments that have no rows of samples"""
    _made: dict[Hashable, list[Rows | Literal["same", "mean"]]] = field(default_factory=dict, init=False)
    """by what the ranks share, and the number of tensors: what generic blocks have made of it"""
    _lengths: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)
    """by micro-batch: the different lengths of its residual streams"""
    _compared: set[tuple[int, tuple[int, ...]]] = field(default_factory=set, init=False)
    """arguments that are the same for all samples, by place and shape, whose values were compared"""

    def begin(self, shares: Sequence[Sequence[Share]]) -> None:
        """Begin a batch: for each micro-batch, the share of every rank of the cube."""
        self._shares = list(shares)
        self._rows, self._whole, self._lengths = {}, {}, {}

    def shares_of(self, num_samples: int) -> tuple[Share, ...]:
        """The share of every rank of the cube in so many samples."""
        return sample_shares(num_samples, self.reshard.mesh.sizes)

    def shard_arguments(
        self, microbatch: int, tensors: Sequence[Tensor], named: Named, structure: Hashable, dims: Dims | None = None
    ) -> list[Tensor] | None:
        """Reshard the arguments of blocks. Returns None, on all ranks, where their structures or shapes differ.

        `dims`: the dimension of each that grows with the samples; None: that isn't known.
        """
        if not self.reshard.has_streams:
            if not isinstance(self.reshard, ReplicatedReshard):
                return list(tensors)
            if dims is not None:
                rows = [
                    None if dim is None else Rows(dim, self.shares_of(x.shape[dim]), *x.shape[dim + 1 : dim + 2])
                    for x, dim in zip(tensors, dims, strict=True)
                ]
                pairs = list(zip(tensors, rows, strict=True))
                self._rows.setdefault(microbatch, []).extend(filter(None, rows))
                self._whole.setdefault(microbatch, []).extend(x for x, of in pairs if of is None)
                return [x if of is None else self.reshard.rows_in(x, of.shares, of.dim) for x, of in pairs]
        is_batch = self._find_batch_tensors(microbatch, tensors, named, structure)
        if is_batch is None:
            return None
        streams, _ = named
        resharded = dict(zip(streams, self.shard_streams(microbatch, [tensors[i] for i in streams]), strict=True))
        shares = self._shares[microbatch]
        return [
            resharded[i] if i in resharded else self.reshard.argument_in(tensor, shares, is_batch=is_batch[i])
            for i, tensor in enumerate(tensors)
        ]

    def shard_streams(self, microbatch: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reshard residual streams alone, padded to whole parts with copies of their last positions.

        The padding is computed with, but never read by other positions, and has no gradient: copies stay as finite as
        what they are copied from.
        """
        dim, shares, resharded = self.reshard.sequence_dim, self._shares[microbatch], []
        lengths = (*self.sequence_lengths(microbatch), *(tensor.shape[dim] for tensor in tensors))
        self._lengths[microbatch] = tuple(dict.fromkeys(lengths))
        parts = self._parts(microbatch)
        for x in tensors:
            if parts is not None and (missing := parts.size(x.shape[dim]) * parts.count - x.shape[dim]):
                x = torch.cat((x, x.narrow(dim, -1, 1).repeat_interleave(missing, dim)), dim)
            resharded.append(self.reshard.stream_in(x, shares))
        return resharded

    def unshard_outputs(self, microbatch: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Reshard what the stack gives the user's code: its output, and what blocks have stored.

        Raises:
            UnsupportedError: a tensor has no longer the rows that it had before.
        """
        reshard, shares = self.reshard, self._shares[microbatch]
        if reshard.has_streams:
            parts, sizes = self._parts(microbatch), [x.shape[reshard.sequence_dim] for x in tensors]
            self._lengths.pop(microbatch, None)  # another pass may have others
            lengths = sizes if parts is None else [parts.length(size) for size in sizes]
            return [reshard.stream_out(x, shares, length) for x, length in zip(tensors, lengths, strict=True)]
        if not isinstance(reshard, ReplicatedReshard):
            return list(tensors)
        rows_of_args = self._rows.get(microbatch) or [Rows(dim, tuple(shares)) for dim in {reshard.batch_dim: 0, 0: 0}]
        key = tuple(rows_of_args), len(tensors)
        if key not in self._made:
            whole = {_digest(x) for x in self._whole.get(microbatch, ())}
            self._made[key] = self._find_made(rows_of_args, whole, tensors)
        outside, rank = [], reshard.mesh.index("xyz")
        for x, made in zip(tensors, self._made[key], strict=True):
            if isinstance(made, Rows):
                own, dim = made.shares[rank].size, made.dim
                if x.dim() <= dim or x.shape[dim] != own * made.length:
                    raise UnsupportedError(
                        f"blocks return or store a tensor of the shape {tuple(x.shape)}, which had {own * made.length} "
                        f"rows in dimension {dim} in an earlier batch of as many samples: it must always have them."
                    )
                x = reshard.rows_out(x.unflatten(dim, (own, -1)), made.shares, dim).flatten(dim, dim + 1)
            outside.append(reshard.mean_out(x, rows_of_args[0].shares) if made == "mean" else x)
        return outside

    def _find_made(
        self, rows_of_args: Sequence[Rows], whole: Collection[bytes], tensors: Sequence[Tensor]
    ) -> list[Rows | Literal["same", "mean"]]:
        """Find what tensors have of samples, on all ranks alike: the shape on one may fit by chance.

        `whole`: digests of arguments without rows, which blocks may hand on.
        """
        found: list[Rows | Literal["same", "mean"]] = []
        gathered = self.all_gather_in_cube([(tuple(x.shape), _digest(x)) for x in tensors])
        candidates = *(replace(of, length=1) for of in rows_of_args), *rows_of_args
        for x, of_ranks in zip(tensors, zip(*gathered, strict=True), strict=True):
            shapes, digests = zip(*of_ranks, strict=True)
            rows = next((one for one in candidates if one.fit(shapes)), None)
            is_handed_on = set(digests) <= set(whole)
            if rows is None and not is_handed_on and len(set(digests)) > 1:
                gets = "the mean over" if x.is_floating_point() else "those of one of"
                warnings.warn(
                    f"blocks return or store a tensor of the shape {tuple(x.shape)}, without an entry for each sample. "
                    f"The step gets {gets} the ranks of the cube, which is right for a mean over samples.",
                    stacklevel=2,
                )
            found.append("same" if is_handed_on else rows or ("mean" if x.is_floating_point() else "same"))
        return found

    def sequence_lengths(self, microbatch: int) -> tuple[int, ...]:
        """Returns the different lengths of the micro-batch's sequences in this pass; none if blocks don't need them."""
        return self._lengths.get(microbatch, ())

    def _parts(self, microbatch: int) -> SequenceParts | None:
        return sequence_parts(self.sequence_lengths(microbatch), self.reshard.mesh.size("y"))

    def _find_batch_tensors(
        self, microbatch: int, tensors: Sequence[Tensor], named: Named, structure: Hashable
    ) -> list[bool] | None:
        """Returns which tensors have something for each sample: as long as the share on all ranks, and no mask.

        None if structures or shapes differ between ranks.

        Raises:
            HanayoError: lengths of streams differ between ranks.
            UnsupportedError: which streams have a gradient does, or values of an argument that has no samples.
        """
        (streams, masks), shares = named, self._shares[microbatch]
        if isinstance(self.reshard, ReplicatedReshard):
            if streams:
                rows = tensors[streams[0]].shape[self.reshard.batch_dim]
                shares = self._shares[microbatch] = self.shares_of(rows)
            dims_of_samples = [self.reshard.sample_dim(tensor, shares) for tensor in tensors]
            return [dim is not None and i not in masks for i, dim in enumerate(dims_of_samples)]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        of_streams = [(shapes[i], tensors[i].requires_grad) for i in streams]
        gathered = self.all_gather_object((structure, shapes, of_streams))
        self._check_streams([other for *_, other in gathered])
        if any(other[0] != structure for other in gathered):
            return None
        of_all_ranks = [other for _, other, _ in gathered]
        if streams:
            # with as many rows as the residual stream has on each rank: user code may make several of one sample
            stream, first = streams[0], self.reshard.mesh.index("x") * self.reshard.mesh.size("yz")
            counted = list(shares)
            for rank, other in enumerate(of_all_ranks, first):
                counted[rank] = replace(counted[rank], stop=counted[rank].start + other[stream][self.reshard.batch_dim])
            shares = self._shares[microbatch] = counted
        sizes = [share.size for share in block_shares(tuple(shares), self.reshard.mesh)]
        is_batch = [
            i not in masks and all(other[i][:1] == (size,) for other, size in zip(of_all_ranks, sizes, strict=True))
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
        if not new or self.reshard.mesh.size("yz") == 1:
            return
        self._compared.update((i, tuple(x.shape)) for i, x in new.items())
        own = [_digest(x) for x in new.values()]
        for others in self.all_gather_object(own):
            for i, one, other in zip(new, own, others, strict=True):
                if one != other:
                    raise UnsupportedError(
                        f"an argument of the blocks, of the shape {tuple(new[i].shape)}, has other values on other "
                        f"ranks of the cube. Give it the samples as dimension 0, or set cube_outside='replicate'."
                    )

    def _check_streams(self, of_all_ranks: list[Any]) -> None:
        """Check that residual streams have one length on all ranks, and a gradient on all or none.

        Raises:
            HanayoError: code before the stack cuts them to the lengths of its own samples.
            UnsupportedError: only some ranks would take part in the backward's collectives.
        """
        for one in zip(*of_all_ranks, strict=False):
            if len({has_gradient for _, has_gradient in one}) > 1:
                raise UnsupportedError(
                    "what the blocks get has a gradient on some ranks of the cube, and none on others. Run the modules "
                    "before the stack for all samples (0 * module(x)), or set cube_outside='replicate'."
                )
            lengths = {shape[self.reshard.sequence_dim] for shape, _ in one}
            if len(lengths) > 1:
                raise HanayoError(
                    f"samples of one micro-batch reach the stack with sequences of {sorted(lengths)} positions on "
                    f"different ranks of the cube; pad them alike, or set cube_outside='replicate'."
                )

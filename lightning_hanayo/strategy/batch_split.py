"""Cuts a batch into micro-batches, and in a cube into each rank's share of them; merges what their steps return.

one rank per stage   micro-batch 0 | micro-batch 1 | ...                  each whole
a cube               0: rank 0's share | rank 1's | ... 1: rank 0's | ... each rank runs user code on its own share
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NoReturn

from torch import Tensor
from typing_extensions import override

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.pipeline_parallel.batches import microbatches
from lightning_hanayo.pipeline_parallel.batches.merge import HostNumbers, PieceSizes, merge
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchPlan, BatchRule, BatchSource
from lightning_hanayo.pipeline_parallel.batches.reader import BatchReader, named_arrays
from lightning_hanayo.strategy.losses import PieceWeights
from lightning_hanayo.tensor_parallel.boundary import (
    AllGatherObject,
    MicrobatchReshard,
    Share,
    block_shares,
    sample_shares,
)
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.versions import version_of


def _no_check() -> None:
    """Check nothing."""


@dataclass(frozen=True)
class SplitBatch:
    """A batch cut into pieces. A piece is a micro-batch, or in a cube one rank's share of a micro-batch."""

    pieces: Sequence[Any]
    """in the order of their samples; None where a rank has none"""
    sizes: PieceSizes
    own: Sequence[int]
    """for each micro-batch, which piece is this rank's"""
    step_inputs: Sequence[Any]
    """what this rank's user code gets for each micro-batch: its piece, or a padding sample"""
    block_input: Callable[[int], Any]
    """makes the samples of a micro-batch that this rank's blocks work on"""
    check: Callable[[], None] = _no_check
    """called before user code runs: raises an error if that of another micro-batch has changed what all share"""
    tensors: Sequence[Sequence[Tensor]] = ()
    """the tensors in each of `step_inputs`, where other ranks run the steps on other pieces"""
    num_alike: int = 1
    """how many ranks run the same steps: their losses add up to that of the batch"""
    counts: bool = True
    """whether metrics that the steps update, and what they give to collectives, count on this rank"""

    def changes(self, microbatch: int) -> dict[int, Tensor]:
        """The tensors that the step has changed in place, of those that other ranks have, too."""
        tensors = enumerate(self.tensors[microbatch] if self.tensors else ())
        return {index: tensor for index, tensor in tensors if version_of(tensor)}

    def store(self, changes: Sequence[Mapping[int, Tensor]]) -> None:
        """Change the batch in place as the steps have done that other ranks have run. `changes`: of all pieces."""
        for piece in set(self.present).difference(self.own):
            tensors = _tensors(self.pieces[piece]) if changes[piece] else []
            for index, tensor in changes[piece].items():
                tensors[index].copy_(tensor)

    @property
    def num_microbatches(self) -> int:
        """How many micro-batches there are."""
        return len(self.step_inputs)

    @property
    def num_samples(self) -> Sequence[int]:
        """The number of samples of each of this rank's pieces; empty if it isn't known, or if loaders have parts."""
        is_known = self.sizes.are_known and len(self.sizes.parts) == 1
        return self.sizes.of(self.own).parts[0] if is_known else ()

    @property
    def shares(self) -> Sequence[int]:
        """What each of this rank's pieces has of the whole, in numbers of samples, also of several loaders.

        Empty if it isn't known.
        """
        return self.sizes.of(self.own).parts[0] if self.sizes.are_known else ()

    @property
    def counted(self) -> tuple[list[Any], list[int]]:
        """The pieces that some rank has, and their samples."""
        return [self.pieces[i] for i in self.present], list(self.sizes.of(self.present).parts[0])

    @property
    def present(self) -> list[int]:
        """The indices of the pieces that some rank has."""
        return [i for i, piece in enumerate(self.pieces) if piece is not None]

    def merge(
        self, results: Sequence[Any], weights: PieceWeights, *, has_loss: bool, numbers: HostNumbers | None = None
    ) -> Any:
        """Merge what the step returned for each piece. `has_loss` says whether it was a training step.

        A training step may skip micro-batches by returning None; the result is None if it has skipped all of them.
        """
        kept = [i for i in self.present if not (has_loss and results[i] is None)]
        if not kept:
            return None
        found, in_mean, in_loss = ([of[i] for i in kept] for of in (results, weights.in_mean, weights.in_loss))
        sizes = self.sizes.of(kept)
        return merge(found, sizes, in_mean, in_loss=in_loss, has_loss=has_loss, numbers=numbers)


class BatchSplitter:
    """Splits batches on pipeline rank 0, which runs whole micro-batches, and merges what their steps return.

    If it `may_run_whole`, a batch that can't be cut is one micro-batch, as in one process.
    """

    is_uneven = False
    """whether micro-batches are to have different sizes, where they can: their tensors show which dimension grows"""
    _counts_samples = False
    """whether the samples of a batch that isn't cut must be known, too"""
    _has_warned = False

    def __init__(self, rule: BatchRule = BatchRule(), *, may_run_whole: bool = False) -> None:  # noqa: B008
        self.rule, self._may_run_whole = rule, may_run_whole
        self._reader = BatchReader(rule)
        self._counter = BatchReader(rule, warns=False)

    def split(self, batch: Any, limit: int, source: BatchSource) -> SplitBatch:
        """Cut `batch` into at most `limit` micro-batches, and these into the ranks' pieces.

        Raises:
            HanayoError: it can't be cut.
        """
        if limit == 1 and not self._counts_samples:
            return self.whole(batch)  # nothing is cut, so nothing is refused
        if self.rule.split is not None:
            return self._split_by_user(batch, self._call_user(batch, limit), source)
        try:
            plan = self._reader.plan(batch, source)
        except HanayoError as error:
            if not self._may_run_whole:
                raise
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(f"batches run whole, as with num_microbatches=1: {error}", stacklevel=2)
            return self.whole(batch)
        return self._split_by_plan(batch, plan, limit)

    def whole(self, batch: Any) -> SplitBatch:
        """A batch in one piece."""
        return _whole([batch], PieceSizes([[1]], self.rule.batch_dim))

    def all_gather(self, value: Any) -> list[Any]:
        """Every rank's `value`, in the order of their pieces. Called by all of them."""
        return [value]

    def by_piece(self, values: Sequence[Any]) -> list[Any]:
        """One value for each piece, from this rank's (one per micro-batch) and those of the ranks that share them."""
        return [value for row in zip(*self.all_gather(list(values)), strict=True) for value in row]

    def _split_by_plan(self, batch: Any, plan: BatchPlan, limit: int) -> SplitBatch:
        count = self._num_microbatches(plan, limit)
        make = microbatches.uneven_sizes if self.is_uneven and len(plan.part_sizes) == 1 else microbatches.sizes
        parts = [make(size, count) for size in plan.part_sizes]
        count = len(parts[0])
        pieces = [batch] if count == 1 else [plan.select(batch, row) for row in _rows(parts)]
        return _whole(pieces, PieceSizes(parts, self.rule.batch_dim), _shared_check(batch, plan, count))

    def _split_by_user(self, batch: Any, pieces: list[Any], source: BatchSource) -> SplitBatch:
        return _whole(pieces, self._sizes(batch, pieces, source))

    def _call_user(self, batch: Any, limit: int) -> list[Any]:
        """The micro-batches that the user's function makes.

        Raises:
            HanayoError: they are not a list, none, or too many.
        """
        assert self.rule.split is not None
        made = self.rule.split(batch, limit)
        if not isinstance(made, (list, tuple)) or not 0 < len(made) <= limit:
            got = f"{len(made)} items" if isinstance(made, (list, tuple)) else f"a {type(made).__name__}"
            raise HanayoError(f"split_batch(batch, {limit}) returned {got}; expected a list of 1 to {limit} pieces")
        return list(made)

    def _sizes(self, batch: Any, pieces: Sequence[Any], source: BatchSource) -> PieceSizes:
        """The samples of pieces that the user's function has made, if the rule counts as many in the whole batch."""
        counts = [0 if piece is None else self._part_sizes(piece, source)[0] for piece in pieces]
        total = self._part_sizes(batch, source)[0]
        return PieceSizes([counts], self.rule.batch_dim, are_known=0 < total == sum(counts))

    def num_samples(self, batch: Any, source: BatchSource = microbatches.ONE_LOADER) -> int:
        """The samples of a batch, of its largest part, whether it is cut or not; 0 if they can't be counted."""
        return max(self._part_sizes(batch, source))

    def _part_sizes(self, batch: Any, source: BatchSource) -> tuple[int, ...]:
        """The samples of each loader's part by the usual rule; (0,) if there are none for it."""
        try:
            return self._counter.plan(batch, source).part_sizes
        except HanayoError:
            return (0,)

    def _num_microbatches(self, plan: BatchPlan, limit: int, num_ranks: int = 1) -> int:
        """How many micro-batches to make; warns if parts of different sizes allow fewer than they have samples."""
        count = plan.num_microbatches(limit, num_ranks)
        if 0 < count < min(limit, *plan.part_sizes):
            warnings.warn(
                f"the loaders' batches of {' and '.join(map(str, plan.part_sizes))} samples are cut into {count} "
                f"micro-batches instead of {limit}, in equal proportions. Multiples of {limit * num_ranks} allow more.",
                stacklevel=2,
            )
        return count


class ReplicatedSplitter(BatchSplitter):
    """For the ranks of a cube that all run whole micro-batches outside the stack, alike."""

    _counts_samples = True

    def __init__(self, rule: BatchRule, mesh: Mesh, boundary: MicrobatchReshard) -> None:
        super().__init__(rule)
        self._mesh = mesh
        self._boundary = boundary

    @override
    def split(self, batch: Any, limit: int, source: BatchSource) -> SplitBatch:
        made = super().split(batch, limit, source)
        self._boundary.begin([sample_shares(samples, self._mesh.sizes) for samples in made.sizes.parts[0]])
        return self._alike(made)

    @override
    def whole(self, batch: Any) -> SplitBatch:
        return self._alike(super().whole(batch))

    def _alike(self, split: SplitBatch) -> SplitBatch:
        return replace(split, num_alike=self._mesh.num_ranks, counts=self._mesh.index("xyz") == 0)


class SharedSplitter(BatchSplitter):
    """For the ranks of a cube of which each runs user code on its share of every micro-batch.

    Args:
        rule: how batches are cut.
        mesh: the cube.
        boundary: is told the shares.
        all_gather: gathers Python objects from all ranks of the cube.
    """

    _counts_samples = True

    def __init__(self, rule: BatchRule, mesh: Mesh, boundary: MicrobatchReshard, all_gather: AllGatherObject) -> None:
        super().__init__(rule)
        self._mesh = mesh
        self._boundary = boundary
        self._all_gather = all_gather

    @override
    def all_gather(self, value: Any) -> list[Any]:
        return self._all_gather(value)

    @override
    def _split_by_plan(self, batch: Any, plan: BatchPlan, limit: int) -> SplitBatch:
        count = self._num_microbatches(plan, limit, self._mesh.num_ranks)
        if not count:
            raise UnsupportedError(
                f"a cube's {self._mesh.num_ranks} ranks can't share {' and '.join(map(str, plan.part_sizes))} samples "
                f"of several loaders in equal proportions. Choose multiples of {self._mesh.num_ranks}."
            )
        rows = _rows([microbatches.sizes(size, count) for size in plan.part_sizes])
        tables = [
            [sample_shares(len(samples), self._mesh.sizes) for samples in row] for row in rows
        ]  # [micro-batch][part]
        self._boundary.begin([table[0] for table in tables])

        def piece(m: int, rank: int) -> Any:
            shares = (table[rank] for table in tables[m])
            return plan.select(batch, [own[s.start : s.stop] for own, s in zip(rows[m], shares, strict=True)])

        def block_input(m: int) -> Any:
            """A copy: the step that has begun with its own samples may have changed them, and this one may, too."""
            of_parts = (block_shares(table, self._mesh) for table in tables[m])
            picks = [
                [i for s in shares for i in own[s.start : s.stop]]
                for own, shares in zip(rows[m], of_parts, strict=True)
            ]
            return plan.select(batch, picks)

        return self._shared(
            [[None if s.is_padding else piece(m, r) for r, s in enumerate(table[0])] for m, table in enumerate(tables)],
            PieceSizes(
                [
                    [0 if s.is_padding else s.size for table in tables for s in table[part]]
                    for part in range(len(plan.part_sizes))
                ],
                self.rule.batch_dim,
            ),
            padding=lambda m: piece(m, self._mesh.index("xyz")),
            block_input=block_input,
            check=_shared_check(batch, plan, count),
        )

    @override
    def _split_by_user(self, batch: Any, pieces: list[Any], source: BatchSource) -> SplitBatch:
        """The user's function also cuts a micro-batch into the ranks' shares; it may make fewer than ranks."""
        num_ranks = self._mesh.num_ranks
        made = [self._call_user(piece, num_ranks) for piece in pieces]
        rows = [[*row, *[None] * (num_ranks - len(row))] for row in made]
        sizes = self._sizes(batch, [piece for row in rows for piece in row], source)
        counts = [[size or 1 for size in sizes.parts[0][m * num_ranks :][:num_ranks]] for m in range(len(rows))]
        self._boundary.begin([_shares(len(of), row) for of, row in zip(made, counts, strict=True)])
        return self._shared(rows, sizes, padding=lambda m: made[m][0], block_input=_no_block_input)

    def _shared(
        self,
        rows: Sequence[Sequence[Any]],
        sizes: PieceSizes,
        *,
        padding: Callable[[int], Any],
        block_input: Callable[[int], Any],
        check: Callable[[], None] = _no_check,
    ) -> SplitBatch:
        """Pieces by micro-batch and rank. `padding` makes what a rank without a piece runs."""
        rank = self._mesh.index("xyz")
        inputs = [padding(m) if row[rank] is None else row[rank] for m, row in enumerate(rows)]

        def unchanged_input(m: int) -> Any:
            if split.changes(m):
                raise UnsupportedError(
                    "the step changes its batch in place, and would run once more on it, as blocks get a mask for "
                    "some samples alone. Change a copy, pass masks always, or set cube_outside='replicate'."
                )
            return block_input(m)

        split = SplitBatch(
            [piece for row in rows for piece in row],
            sizes,
            [m * self._mesh.num_ranks + rank for m in range(len(rows))],
            inputs,
            unchanged_input,
            check,
            list(map(_tensors, inputs)),
        )
        return split


def _whole(pieces: Sequence[Any], sizes: PieceSizes, check: Callable[[], None] = _no_check) -> SplitBatch:
    """Micro-batches that one rank runs whole."""
    return SplitBatch(pieces, sizes, range(len(pieces)), pieces, lambda m: pieces[m], check)


def _shared_check(batch: Any, plan: BatchPlan, num_microbatches: int) -> Callable[[], None]:
    """Returns a function that raises an error if a step has changed a tensor in place that stays whole."""
    if num_microbatches == 1 or not plan.shared:
        return _no_check
    versions = [(tensor, version_of(tensor)) for tensor in plan.shared.values()]

    def check() -> None:
        for tensor, version in versions:
            if version_of(tensor) != version:
                named = named_arrays(batch, BatchRule(), "batch")
                name = next((path for path, array, _ in named if array is tensor), "a tensor in the batch")
                raise UnsupportedError(
                    f"the step changes {name} {tuple(tensor.shape)} in place, which {num_microbatches} micro-batches "
                    f"share. Change {name}.clone(), or change it in on_after_batch_transfer."
                )

    return check


def _tensors(piece: Any) -> list[Tensor]:
    """The tensors of a piece that count their own changes: a micro-batch's, or one rank's share of it."""
    return [leaf for leaf in microbatches.leaves(piece) if isinstance(leaf, Tensor) and not leaf.requires_grad]


def _rows(parts: Sequence[Sequence[int]]) -> list[list[range]]:
    """For each micro-batch, the samples of each part."""
    ends = [list(accumulate(sizes)) for sizes in parts]
    ranges = [[range(e - s, e) for s, e in zip(*pair, strict=True)] for pair in zip(parts, ends, strict=True)]
    return [list(row) for row in zip(*ranges, strict=True)]


def _shares(num_present: int, counts: Sequence[int]) -> tuple[Share, ...]:
    """Shares of so many samples, one after the other; ranks above the present ones run the first share once more."""
    ends = list(accumulate(counts))
    present = [Share(end - size, end) for end, size in zip(ends, counts, strict=True)][:num_present]
    return (*present, *[Share(0, counts[0], is_padding=True)] * (len(counts) - num_present))


def _no_block_input(_: int) -> NoReturn:
    raise UnsupportedError(
        "blocks get a mask for some samples of a micro-batch and none for others, and split_batch has cut it for the "
        "ranks of a cube. Pass masks always, or set cube_outside='replicate'."
    )

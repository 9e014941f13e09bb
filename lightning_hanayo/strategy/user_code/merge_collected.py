"""Merges what the steps of a batch's micro-batches have collected, so that it is as if the step had run once.

                             micro-batch 0    micro-batch 1      the list, or the attribute
an entry for each sample     [3, classes]     [2, classes]       [5, classes]
the step's loss, logged      0.4              0.6                their mean, with the weights of the micro-batches
items, one for each sample   1, 7, 3          5, 2               1, 7, 3, 5, 2
other numbers                4                2                  4, 2: a list gets one for each micro-batch, and a
                                                                 warning names it
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.batches.containers import Array, children, with_children
from lightning_hanayo.runtime.capture.holder import PLAIN
from lightning_hanayo.runtime.microbatches import PieceSizes, are_whole_numbers
from lightning_hanayo.strategy.batch_split import SplitBatch
from lightning_hanayo.strategy.losses.loss_weight import PieceWeights
from lightning_hanayo.strategy.user_code.collected import MUTATED, Collections, Left, Path, is_mean
from lightning_hanayo.strategy.user_code.stand_ins import Missing


class _Apart(Exception):
    """The values of micro-batches can't be merged into one."""


class CollectedMerge:
    """Merges the pieces of one batch: micro-batches, or in a cube the ranks' shares of them.

    Args:
        left: what each piece's step has left, in the order of their samples.
        microbatches: of each piece, its micro-batch.
        sizes: the samples of the pieces.
        in_loss: each piece's weight in the loss.
        in_mean: its weight in means.
    """

    def __init__(
        self,
        left: Sequence[Left],
        microbatches: Sequence[int],
        sizes: PieceSizes,
        in_loss: Sequence[float],
        in_mean: Sequence[float],
    ) -> None:
        self._left = left
        self._microbatches = microbatches
        self._sizes = sizes
        self._in_loss, self._in_mean = in_loss, in_mean
        self.kept_apart: list[str] = []
        """names of what holds values of micro-batches, not of the batch"""

    def appended(self) -> dict[Path, list[Any]]:
        """The items that each list gets."""
        return {path: self._items(path) for path in _paths(one.appended for one in self._left)}

    def assigned(self) -> dict[Path, Any]:
        """The values that attributes and keys get, where it isn't what the last micro-batch has left."""
        made = {}
        for path in _paths(one.assigned for one in self._left):
            values = [one.assigned.get(path, MUTATED) for one in self._left]
            set_by = [path in one.assigned for one in self._left]
            present = [value for value, is_set in zip(values, set_by, strict=True) if is_set]
            if _are_constant(present) and not self._may_be_sizes(present, set_by):
                continue
            try:
                made[path] = self._value(values)
            except _Apart:
                self.kept_apart.append(name_of(path))
                if self._differ_between_ranks(values, set_by):
                    made[path] = Missing(
                        name_of(path),
                        "it is set by the step, and each rank of the cube runs it on its own samples, so that the "
                        "ranks' values differ",
                        "Log it with self.log, append it to a list, or set HanayoStrategy(cube_outside='replicate')",
                    )
        return made

    def _may_be_sizes(self, values: Sequence[Any], set_by: Sequence[bool]) -> bool:
        """Whether the equal values may be the number of samples of each piece; an equal one isn't set again."""
        sizes = [size for size, is_set in zip(self._sizes.parts[0], set_by, strict=True) if is_set]
        return type(values[0]) is int and list(values) == sizes

    def _differ_between_ranks(self, values: Sequence[Any], set_by: Sequence[bool]) -> bool:
        """Whether the ranks that share a micro-batch have left different values for it."""
        rows: dict[int, list[int]] = {}
        for piece, microbatch in enumerate(self._microbatches):
            rows.setdefault(microbatch, []).append(piece)
        shared = [row for row in rows.values() if len(row) > 1 and any(set_by[i] for i in row)]
        return any(not _are_constant([values[i] for i in row]) for row in shared)

    def _items(self, path: Path) -> list[Any]:
        columns = [one.appended.get(path, []) for one in self._left]
        counts = [len(column) for column in columns]
        if len(columns) == 1:
            return columns[0]
        if self._are_samples(counts):
            return [item for column in columns for item in column]
        if len(set(counts)) == 1:
            try:
                return [self._value(row) for row in zip(*columns, strict=True)]
            except _Apart:
                pass
        self.kept_apart.append(name_of(path))
        return [item for i, column in enumerate(columns) if not self._is_copy(i, path) for item in column]

    def _are_samples(self, counts: Sequence[int]) -> bool:
        """Whether the steps have added one item for each sample."""
        return self._sizes.are_known and set(counts) != {1} and any(counts == list(part) for part in self._sizes.parts)

    def _is_copy(self, piece: int, path: Path) -> bool:
        """Whether another rank of the cube has collected the same for this micro-batch, as a collective gave it.

        Raises:
            UnsupportedError: it has collected one number, which may be the same by chance.
        """
        first = self._microbatches.index(self._microbatches[piece])
        if first == piece or not self._left[piece].used_collectives:
            return False
        own, other = self._left[piece].appended.get(path, []), self._left[first].appended.get(path, [])
        is_copy = _are_equal(own, other)
        if is_copy and not any(isinstance(item, Array) and item.ndim for item in own):
            raise UnsupportedError(
                f"{name_of(path)}: a step that calls a collective has collected the number {own[0]} on several ranks "
                f"of the cube, and it isn't known whether it counts once or for each of them. Collect the ranks' own "
                f"values, and sum over them at the end of the epoch."
            )
        return is_copy

    def _value(self, values: Sequence[Any]) -> Any:
        """One value for all pieces.

        Raises:
            _Apart: there is none.
        """
        first = values[0]
        if len(values) == 1 and first is not MUTATED:
            return first
        if any(type(value) is not type(first) for value in values) or first is MUTATED:
            raise _Apart
        if isinstance(first, Array) and first.ndim:
            dim = self._sizes.sample_dim(values)
            if dim is None:
                raise _Apart
            return torch.cat(list(values), dim) if isinstance(first, Tensor) else np.concatenate(values, dim)
        if is_mean(first):
            return self._mean(values)
        inside = children(first)
        if inside is None and isinstance(first, str | bool | None.__class__) and _are_constant(values):
            return first  # equal integers may be counts of the pieces' samples, so they aren't one value
        if inside is None:
            raise _Apart
        items = [children(value) or {} for value in values]
        if any(item.keys() != inside.keys() for item in items):
            raise _Apart
        return with_children(first, {key: self._value([item[key] for item in items]) for key in inside})

    def _mean(self, values: Sequence[Any]) -> Any:
        """The mean of values that are known to be means: the step has returned or logged the same numbers."""
        if are_whole_numbers(values):
            raise _Apart
        found = [float(value) for value in values]
        columns = zip(*(map(float, one.means) for one in self._left), strict=False)
        if not any(list(column) == found for column in columns):
            raise _Apart
        weights = self._in_loss if self._are_losses(found) else self._in_mean
        parts = [value * weight for value, weight in zip(values, weights, strict=True) if weight]
        return sum(parts[1:], parts[0]) if parts else values[0]

    def _are_losses(self, numbers: Sequence[float]) -> bool:
        losses = [float(one.loss) for one in self._left if one.loss is not None and one.loss.numel() == 1]
        return losses == numbers


def keep_collected(
    collections: Collections, split: SplitBatch, weights: PieceWeights, left: Sequence[Left]
) -> Sequence[str]:
    """Put what the steps of a batch's pieces have left into the module as if the step had run once.

    Returns the names of what holds values of micro-batches.
    """
    kept, num_ranks = split.present, len(left) // split.num_microbatches
    if len(kept) == 1 or not any(left[i].appended or left[i].assigned for i in kept):
        return ()
    merge = CollectedMerge(
        [left[i] for i in kept],
        [i // num_ranks for i in kept],
        split.sizes.of(kept),
        in_loss=[weights.in_loss[i] for i in kept],
        in_mean=[weights.in_mean[i] for i in kept],
    )
    collections.store(merge.appended(), merge.assigned())
    return merge.kept_apart


def name_of(path: Path) -> str:
    """As it is written in the code: self.outputs['train']."""
    owner, name, *keys = path
    return f"{owner}.{name}{''.join(f'[{key!r}]' for key in keys)}"


def warn_of_parts(names: Sequence[str], num_microbatches: int) -> None:
    """Say which lists and attributes hold values of micro-batches."""
    if names and num_microbatches > 1:
        warnings.warn(
            f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}: set by the step for each of the "
            f"{num_microbatches} micro-batches of a batch, and hooks that read it find their values, as with "
            f"accumulate_grad_batches: a list has an item for each. To get those of the batch, collect what the step "
            f"also returns or logs (a mean over samples), or tensors with an entry for each sample.",
            stacklevel=2,
        )


def _paths(parts: Any) -> list[Path]:
    return sorted({path for part in parts for path in part}, key=repr)


def _are_constant(values: Sequence[Any]) -> bool:
    """Whether all pieces have left one and the same plain value."""
    return isinstance(values[0], PLAIN) and all(type(v) is type(values[0]) and v == values[0] for v in values)


def _are_equal(items: Sequence[Any], others: Sequence[Any]) -> bool:
    def equal(a: Any, b: Any) -> bool:
        if isinstance(a, Array):
            return type(a) is type(b) and np.array_equal(torch.as_tensor(a).cpu(), torch.as_tensor(b).cpu())
        inside, other = children(a), children(b)
        if inside is None or other is None:
            return bool(a == b)
        return inside.keys() == other.keys() and all(equal(inside[key], other[key]) for key in inside)

    return bool(items) and len(items) == len(others) and all(map(equal, items, others))

"""The results of the micro-batches' steps, merged into those of the whole batch.

outputs of 3, 3 and 2 samples, [3, 5] [3, 5] [2, 5]     ->  [8, 5]
means of them, 0.5 0.7 0.4                              ->  0.55, weighted by samples
counts, 2 3 1                                           ->  6
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.microbatches import Array, children, leaves, own_rows, with_children


@dataclass(frozen=True)
class PieceSizes:
    """How many samples the pieces of a batch have, whose results are merged.

    Args:
        parts: for each part of the batch (one, unless it comes from several loaders) the samples of each piece.
        batch_dim: the dimension of the samples in tensors that have it.
        are_known: False if the user's own function has cut the batch into pieces that can't be counted.
    """

    parts: Sequence[Sequence[int]]
    batch_dim: int = 0
    are_known: bool = True

    def sample_dim(self, arrays: Sequence[Any]) -> int | None:
        """The dimension along which these arrays, one per piece, have an entry for each sample, if there is one."""
        if not all(array.ndim for array in arrays):
            return None
        dims = [dim for dim in (self.batch_dim, 0) if all(dim < array.ndim for array in arrays)]
        return next((dim for dim in dims if self.fit([array.shape[dim] for array in arrays])), None)

    def of(self, pieces: Sequence[int]) -> "PieceSizes":
        """Those of some of the pieces."""
        return PieceSizes([[part[i] for i in pieces] for part in self.parts], self.batch_dim, self.are_known)

    def fit(self, lengths: Sequence[int]) -> bool:
        """Whether there is something for each sample."""
        return not self.are_known or any(list(lengths) == list(part) for part in self.parts)


class HostNumbers:
    """The numbers of tensors with one element: all that are in `trees` are copied to the host at once, by a first call.

    Each copy waits until the device has finished everything launched before.
    """

    def __init__(self, *trees: Any) -> None:
        self._trees = list(trees)
        self._known: dict[int, tuple[Tensor, float]] = {}
        """by id; a tensor is kept, so that its id stays its own"""

    def add(self, tree: Any) -> None:
        """Copy those in `tree`, too, when one of them is asked for."""
        self._trees.append(tree)

    def __call__(self, value: Any) -> float:
        """The number of a tensor, or a plain one."""
        if not isinstance(value, Tensor):
            return float(value)
        if id(value) not in self._known:
            single = (one for one in leaves(self._trees) if isinstance(one, Tensor) and one.numel() == 1)
            new = {id(one): one for one in (value, *single) if one.device == value.device and not one.is_complex()}
            numbers = torch.stack([one.detach().reshape(()).double() for one in new.values()]).tolist()
            self._known |= {key: (one, number) for (key, one), number in zip(new.items(), numbers, strict=True)}
            self._trees.clear()
        return self._known[id(value)][1]

    def are_whole(self, values: Sequence[Any]) -> bool:
        """Whether floats are whole numbers, as counts are, and so no means. Equal ones may be constants."""
        numbers = set(map(self, values))
        return len(numbers) > 1 and all(map(float.is_integer, numbers)) and max(map(abs, numbers)) > 1


@dataclass(frozen=True)
class _Weights:
    """Of micro-batches: in means, and in the loss and values that equal it, if its values are given."""

    in_mean: Sequence[float]
    in_loss: Sequence[float]
    losses: Sequence[float] | None
    number: HostNumbers

    def of(self, values: Sequence[Any]) -> Sequence[float]:
        """Those of a column of scalars."""
        is_loss = self.losses is not None and list(map(self.number, values)) == list(self.losses)
        return self.in_loss if is_loss else self.in_mean


def merge(
    results: Sequence[Any],
    sizes: PieceSizes,
    weights: Sequence[float],
    *,
    in_loss: Sequence[float] | None = None,
    has_loss: bool = False,
    numbers: HostNumbers | None = None,
) -> Any:
    """Merge a step's results for all micro-batches into one.

    Tensors, arrays and lists as long as their micro-batch are concatenated. Scalars are averaged with `weights`, which
    sum to 1; the loss, and values that equal it in each micro-batch, with the weights `in_loss`, if given. Integers are
    added as counts, with a warning if they aren't the samples of the micro-batches; an int that is the same for all is
    kept. Of other tensors the first one is kept, with a warning if they differ. Containers keep their type. A single
    result is returned as it is.

    Results of a training step have a loss (a tensor, or the mapping's "loss"). It is averaged if it has one element; a
    loss of shape [1] would look like the result of one sample.

    Raises:
        UnsupportedError: some results are None, and others are not.
    """
    losses, numbers = None, numbers or HostNumbers(results)
    if has_loss and in_loss is not None and list(in_loss) != list(weights):
        found = [result.get("loss") if isinstance(result, Mapping) else result for result in results]
        if all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in found):
            losses = list(map(numbers, found))
    own = _Weights(weights, in_loss or weights, losses, numbers)
    return _merge(results, sizes, own, has_loss=has_loss, name="outputs")


def _merge(results: Sequence[Any], sizes: PieceSizes, weights: _Weights, *, has_loss: bool, name: str) -> Any:
    first = results[0]
    if len(results) == 1:
        return first
    if 0 < sum(result is None for result in results) < len(results):
        raise UnsupportedError(
            f"{name}: the step returns None for some micro-batches of a batch, and values for others, so there is no "
            f"result of the whole batch. Return values for all samples, or set num_microbatches=1."
        )
    if isinstance(first, Array):
        if has_loss and isinstance(first, Tensor) and all(result.numel() == 1 for result in results):
            return _mean(results, weights.in_loss)
        dim = sizes.sample_dim(results)
        if dim is not None:
            return torch.cat(list(results), dim) if isinstance(first, Tensor) else np.concatenate(results, dim)
        if not isinstance(first, Tensor) or first.ndim or first.dtype == torch.bool:
            same: Any = torch.equal if isinstance(first, Tensor) else np.array_equal
            if not all(same(first, result) for result in results[1:]):
                warnings.warn(
                    f"{name}: the step returns {type(first).__name__}s of shape {tuple(first.shape)} that differ "
                    "between micro-batches; the first one's is kept. Let the first dimension be that of the samples.",
                    stacklevel=2,
                )
            return first
        if not first.is_floating_point():
            return _count(results, sizes, weights.number, name)
        _warn_of_whole_numbers(results, weights.number, name)
        return _mean(results, weights.of(results))
    if isinstance(first, float):
        _warn_of_whole_numbers(results, weights.number, name)
        return sum(r * w for r, w in zip(results, weights.of(results), strict=True) if w)
    if type(first) is int and (len(set(results)) > 1 or _are_sizes(results, sizes)):
        return _count(results, sizes, weights.number, name)
    if isinstance(first, list) and _list_samples(results, sizes):
        return [item for result in results for item in result]
    rows = [own_rows(result, 0) or 0 for result in results]
    if all(rows) and sizes.fit(rows) and hasattr(first, "__torch_function__"):  # a TensorDict
        return torch.cat(list(results))
    items = children(first)
    if items is None:
        return first
    contents = [children(result) or {} for result in results]
    for key in items:
        is_loss = has_loss and isinstance(first, Mapping) and key == "loss"
        column = [one[key] for one in contents]
        items[key] = _merge(column, sizes, weights, has_loss=is_loss, name=f"{name}[{key!r}]")
    return with_children(first, items)


def _mean(results: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean. A micro-batch with weight 0 does not count, even if its value is NaN."""
    weighted = [result * weight for result, weight in zip(results, weights, strict=True) if weight]
    return torch.stack(weighted).sum(0) if weighted else results[0]


def _count(results: Sequence[Any], sizes: PieceSizes, number: HostNumbers, name: str) -> Any:
    counts = list(map(number, results))
    if not _are_sizes(counts, sizes) or len(set(counts)) == 1:  # which a constant may be by chance
        warnings.warn(
            f"{name}: the step returns an integer for each micro-batch. They are added, as counts are; if it isn't a "
            f"count, return a float or a string.",
            stacklevel=2,
        )
    return sum(results[1:], results[0])


def _warn_of_whole_numbers(results: Sequence[Any], number: HostNumbers, name: str) -> None:
    if number.are_whole(results):
        warnings.warn(
            f"{name}: the step returns a whole number as a float for each micro-batch. They are averaged, as means "
            f"are. If it is a count, return an integer: integers are added.",
            stacklevel=2,
        )


def _are_sizes(results: Sequence[Any], sizes: PieceSizes) -> bool:
    """Whether the integers are the numbers of samples of the micro-batches."""
    return sizes.are_known and any([int(result) for result in results] == list(part) for part in sizes.parts)


def _list_samples(results: Sequence[Any], sizes: PieceSizes) -> bool:
    """Whether the lists hold one item for each sample, and not several tensors of all samples."""
    if any(not isinstance(result, list) for result in results) or not sizes.fit([len(result) for result in results]):
        return False
    columns = zip(*results, strict=False)
    return len({len(r) for r in results}) > 1 or not all(
        all(isinstance(item, Tensor) for item in column) and sizes.sample_dim(column) is not None for column in columns
    )

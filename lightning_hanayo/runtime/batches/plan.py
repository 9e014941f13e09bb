"""The plan of one batch: which tensors are cut by rows, which lists by items, and what stays whole.

{"x": [8, 16], "y": [8], "table": [1, 16], "boxes": [[2, 4], [0, 4], ... 8 tensors], "scale": []}
   by rows     by rows     whole              by items                                 whole

A batch of several loaders (Lightning's CombinedLoader) has a part from each, and a part has its own number of samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.runtime.batches.containers import (
    Array,
    Attribute,
    children,
    leaves,
    rows,
    uncoupled,
    with_children,
)

SplitFunction = Callable[[Any, int], Sequence[Any]]
"""The user's: cuts a batch into at most so many micro-batches."""


@dataclass(frozen=True)
class BatchRule:
    """The options `batch_dim`, `split_batch` and `whole` of `HanayoStrategy`, which documents them."""

    batch_dim: int = 0
    split: SplitFunction | None = None
    whole: frozenset[str] = frozenset()

    def keeps_whole(self, key: Any) -> bool:
        """Whether the value of this key, field or attribute stays whole."""
        return (key.name if isinstance(key, Attribute) else key) in self.whole

    def sample_dim(self, ndim: int) -> int:
        """The dimension where a tensor with so many dimensions usually has its samples."""
        return self.batch_dim if self.batch_dim < ndim else 0


@dataclass(frozen=True)
class BatchSource:
    """Where a batch comes from.

    Args:
        stage: training, validation ...; batches of one stage are alike.
        loaders: the containers of the loaders that the batch has a part of each from, with None for each loader; None
            if there is only one loader.
        is_collated: whether torch's `default_collate` has made the batch. It makes no lists of samples.
        is_unbatched: whether a `DataLoader(batch_size=None)` hands on what its dataset gives: it may be one sample.
    """

    stage: str = ""
    loaders: Any = None
    is_collated: bool = False
    is_unbatched: bool = False


ONE_LOADER = BatchSource()


@dataclass(frozen=True)
class Whole:
    """Stays whole. Each micro-batch gets it in lists and dictionaries of its own."""


@dataclass(frozen=True)
class Rows:
    """A tensor or an array, cut along a dimension, or what its class cuts along it."""

    dim: int


@dataclass(frozen=True)
class Items:
    """A list with one item for each sample, and how its attributes are cut."""

    cuts: dict[Any, "Cut"] = field(default_factory=dict)


@dataclass(frozen=True)
class Inside:
    """A container, whose items are cut."""

    cuts: dict[Any, "Cut"]


@dataclass(frozen=True)
class Part:
    """What one of several loaders gave."""

    number: int
    cut: "Cut"


Cut = Whole | Rows | Items | Inside | Part
WHOLE = Whole()


@dataclass(frozen=True)
class BatchPlan:
    """How one batch is cut. `part_sizes` are the samples of each loader's part; usually there is one part.

    Micro-batches share the memory of the batch, and each of their tensors counts its changes in place for itself:
    autograd would take a change of one micro-batch's rows for one of all others.

    Example:
        >>> plan = BatchReader(BatchRule()).plan({"x": torch.zeros(8, 16), "table": torch.zeros(1, 16)})
        >>> plan.part_sizes, plan.select(batch, [range(2, 4)])["x"].shape
        ((8,), (2, 16))
    """

    cut: Cut
    part_sizes: tuple[int, ...]
    shared: dict[int, Tensor] = field(default_factory=dict)
    """the tensors that micro-batches have got whole, by their ids"""

    def select(self, batch: Any, samples: Sequence[Sequence[int]]) -> Any:
        """Return the samples with these indices, for each part: views of tensors for a range of indices."""
        return self._select(batch, self.cut, samples, 0)

    def _select(self, value: Any, cut: Cut, samples: Sequence[Sequence[int]], part: int) -> Any:
        if isinstance(cut, Part):
            return self._select(value, cut.cut, samples, cut.number)
        if isinstance(cut, Whole):
            return self._whole(value)
        if isinstance(cut, Rows):
            return _rows(value, cut.dim, samples[part])
        inside = (children(value) or {}) if cut.cuts else {}
        new = {
            key: self._whole(inside[key], copies=not is_dataclass(value))  # which computes some fields again
            if own == WHOLE
            else self._select(inside[key], own, samples, part)
            for key, own in cut.cuts.items()
        }
        return with_children(value, {i: value[i] for i in samples[part]} | new if isinstance(cut, Items) else new)

    def _whole(self, value: Any, *, copies: bool = True) -> Any:
        """What stays whole, in lists and dictionaries of its own. One made in inference mode counts no changes."""
        if copies and type(value) in (dict, list, tuple):
            return with_children(value, {key: self._whole(item) for key, item in (children(value) or {}).items()})
        if copies and isinstance(value, Tensor) and value.is_inference():
            return value.clone()
        self.shared.update((id(leaf), leaf) for leaf in leaves(value) if isinstance(leaf, Tensor))
        return value

    def num_microbatches(self, limit: int, num_ranks: int = 1) -> int:
        """At most `limit`, and at most as many as there are samples.

        Parts of different sizes are cut into equal pieces, which `num_ranks` ranks can share evenly: otherwise no
        weight of a micro-batch in the loss would be right for all parts. 0 if that is impossible.
        """
        if len(set(self.part_sizes)) == 1:
            return max(1, min(limit, self.part_sizes[0]))
        fitting = (n for n in range(limit, 0, -1) if all(size % (n * num_ranks) == 0 for size in self.part_sizes))
        return next(fitting, 0)


def joined(cuts: dict[Any, Cut]) -> Cut:
    """How to cut a container; one in which nothing is cut stays whole."""
    return Inside(cuts) if any(cut != WHOLE for cut in cuts.values()) else WHOLE


def _rows(value: Any, dim: int, indices: Sequence[int]) -> Any:
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return value.index_select(dim, torch.tensor(indices, device=value.device))
    if isinstance(value, Array):
        return uncoupled(rows(value, dim, indices))
    try:
        return uncoupled(rows(value, dim, indices))
    except Exception as error:  # any error in the user's class
        raise HanayoError(
            f"a {type(value).__qualname__} can't be cut into samples {list(indices)}, as a cube needs where blocks get "
            f"a mask for some samples and none for others. Pass masks always, or set cube_outside='replicate'."
        ) from error

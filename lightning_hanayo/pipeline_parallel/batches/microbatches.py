"""Sizes of micro-batches, and a signature of their shapes.

11 samples, 4 micro-batches  ->  3, 3, 3, 2          2 samples, 4 micro-batches  ->  1, 1

The plan of one batch: which tensors are cut by rows, which lists by items, and which values stay whole.

{"x": [8, 16], "y": [8], "table": [1, 16], "boxes": [[2, 4], [0, 4], ... 8 tensors], "scale": []}
   by rows     by rows     whole              by items                                 whole

Images in one tensor of patches are ragged: each sample has its own number of rows.

A batch of several loaders (Lightning's CombinedLoader) has a part from each, and a part has its own number of samples.

A container is a mapping, a dataclass, a `SimpleNamespace`, a named tuple, a tuple or a list. Attributes of mappings and
lists, besides the items (`encoding._encodings`), count as content, too. Micro-batches and merged results get containers
of the same type. Other classes, and mappings, may define slices of samples themselves: a `TensorDict`, a data frame, a
`UserList`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.seeds import seed_of

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
        is_unbatched: whether a `DataLoader(batch_size=None)` hands on its dataset's values: it may be one sample.
        module: that gets the batch, if its configs are known.
    """

    stage: str = ""
    loaders: Any = None
    is_collated: bool = False
    is_unbatched: bool = False
    module: nn.Module | None = None


ONE_LOADER = BatchSource()


@dataclass(frozen=True)
class Whole:
    """Stays whole. Each micro-batch gets it in lists and dictionaries of its own."""


@dataclass(frozen=True)
class Rows:
    """A tensor, an array, or a value whose class defines slices, cut along a dimension."""

    dim: int


@dataclass(frozen=True)
class Ragged:
    """A tensor or list in which each sample has its own number of rows; a micro-batch without any gets None."""

    ends: tuple[int, ...]
    """for each sample, where its rows end and those of the next one begin"""


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
    """The part of one of several loaders."""

    number: int
    cut: "Cut"


Cut = Whole | Rows | Ragged | Items | Inside | Part
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
        if isinstance(cut, Ragged):
            starts = (0, *cut.ends)
            chosen = [row for i in samples[part] for row in range(starts[i], cut.ends[i])]
            if isinstance(value, list):
                return [value[row] for row in chosen] or None
            is_range = isinstance(samples[part], range)  # a view
            return _rows(value, 0, range(chosen[0], chosen[-1] + 1) if is_range else chosen) if chosen else None
        inside = (children(value) or {}) if cut.cuts else {}
        new = {
            key: self._whole(inside[key], copies=not is_dataclass(value))  # which computes some fields again
            if own == WHOLE
            else self._select(inside[key], own, samples, part)
            for key, own in cut.cuts.items()
        }
        return with_children(value, {i: value[i] for i in samples[part]} | new if isinstance(cut, Items) else new)

    def _whole(self, value: Any, *, copies: bool = True) -> Any:
        """A value that stays whole, in lists and dictionaries of its own."""
        if copies and type(value) in (dict, list, tuple):
            return with_children(value, {key: self._whole(item) for key, item in (children(value) or {}).items()})
        if copies and isinstance(value, Tensor) and value.is_inference():
            return value.clone()  # an inference tensor counts no changes in place
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


Array = Tensor | np.ndarray
"""Values that have a shape, and can be cut."""


@dataclass(frozen=True)
class Attribute:
    """The key of an attribute of a mapping, a list or a tuple."""

    name: str


def children(value: Any) -> dict[Any, Any] | None:
    """The items of a container by key, field name or index, and its attributes; None for any other value."""
    if isinstance(value, Mapping):
        return _with_attributes(value, dict(value))
    if isinstance(value, (torch.Size, PackedSequence)):
        return None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if isinstance(value, (tuple, list)):
        return _with_attributes(value, dict(enumerate(value)))
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value) if hasattr(value, field.name)}
    return dict(vars(value)) if isinstance(value, SimpleNamespace) else None


def _with_attributes(value: Any, items: dict[Any, Any]) -> dict[Any, Any]:
    """The items and the attributes, but for the one that stores the items, and those that repeat one."""
    attributes = getattr(value, "__dict__", None)
    if not attributes or attributes is value:
        return items
    return items | {
        Attribute(name): item
        for name, item in attributes.items()
        if name not in items and not (isinstance(item, Mapping) and item.keys() == items.keys())
    }


def with_children(value: Any, new: dict[Any, Any]) -> Any:
    """Return a container of the same type with other items; `value` itself does not change.

    Raises:
        HanayoError: that is impossible for this type.
    """
    items = {key: item for key, item in new.items() if not isinstance(key, Attribute)}
    if type(value) is SimpleNamespace:
        return SimpleNamespace(**new)
    if isinstance(value, Mapping):
        made = with_values(value, items)
    elif isinstance(value, tuple):
        make: Any = getattr(type(value), "_make", type(value))  # of a named tuple, or of another one
        made = make(items.values())
    elif isinstance(value, list):
        made = [] if type(value) is list else copy(value)
        made[:] = items.values()
    else:
        # `replace` runs `__post_init__`, which computes values that depend on the fields; then all fields that differ
        # are set, for it may have changed them once more. Where a field can't be given (an `InitVar`), it is copied.
        changed = {name: item for name, item in new.items() if item is not getattr(value, name)}
        try:
            made = replace(value, **{field.name: new[field.name] for field in fields(value) if field.init})
        except Exception:  # any error in the user's class
            made = copy(value)
        for name, item in changed.items():
            object.__setattr__(made, name, item)  # the dataclass may be frozen
        return made
    for key in new.keys() - items.keys():
        if new[key] is not vars(value)[key.name] or not hasattr(made, key.name):
            setattr(made, key.name, new[key])
    return made


def with_values(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """Return a mapping of the same type with other `values`; `mapping` itself does not change.

    It is copied with all its attributes, and the values are set one by one: subclasses of dict (a defaultdict, an
    output of transformers), and classes with `__copy__`, such as a `UserDict`. Other types are constructed from a
    dictionary, if nothing but the items is lost by that.

    Raises:
        HanayoError: neither works for this type.
    """
    cls = type(mapping)
    if cls is dict:
        return values
    # If the items are the attributes, a copy would keep the old values as attributes. Others might share their values.
    copies = (isinstance(mapping, dict) or hasattr(cls, "__copy__")) and getattr(mapping, "__dict__", 0) is not mapping
    cause: Exception | None = None
    for make in (_copied, _constructed) if copies else (_constructed,):
        try:
            return make(mapping, values)
        except Exception as error:  # any error in the user's class: the other way may work
            cause = error
    raise HanayoError(
        f"a {cls.__module__}.{cls.__qualname__} can't be made with other values, which each micro-batch needs. Let "
        "its __init__ take a dictionary, or give it __copy__ and __setitem__, or slices of samples, or set "
        "HanayoStrategy(split_batch=lambda batch, n: ...), a function that returns at most n micro-batches."
    ) from cause


def own_rows(value: Any, dim: int) -> int | None:
    """How many samples a value has along `dim` by slices that its class defines; None if it defines none of samples.

    Such a slice has the same type, and as many rows as it should: by all tensors in it, or by its length.
    """
    if not _has_own_slices(value):
        return None
    try:
        first = rows(value, dim, range(1))
        for whole, one in zip(_row_counts(value, dim), _row_counts(first, dim), strict=True):
            if type(first) is type(value) and len(whole) == 1 and one == {1}:
                return whole.pop()
    except Exception:  # any error in the user's class
        return None
    return None


def _has_own_slices(value: Any) -> bool:
    """Whether the class of a value may define slices."""
    if isinstance(value, (Array, str, bytes, torch.Size)) or hasattr(type(value), "__missing__"):
        return False
    return getattr(type(value), "__getitem__", None) not in (
        dict.__getitem__,
        list.__getitem__,
        tuple.__getitem__,
        None,
    )


def rows(value: Any, dim: int, indices: Sequence[int]) -> Any:
    """Some rows of a value that can be indexed: a view of a tensor if `indices` is a range."""
    wanted = slice(indices.start, indices.stop) if isinstance(indices, range) else list(indices)
    return value[(slice(None),) * dim + (wanted,)] if dim else value[wanted]


def _row_counts(value: Any, dim: int) -> Iterator[set[int]]:
    """The numbers of rows of the tensors in a value, and then its length."""
    yield {leaf.shape[dim] if leaf.ndim > dim else 0 for leaf in leaves(value) if isinstance(leaf, Array)}
    yield {len(value)} if dim == 0 else set()


def uncoupled(value: Any) -> Any:
    """Let the tensors in new rows count changes in place for themselves; they share memory with the batch.

    Autograd takes each change of a view for one of all views with the same count, whichever rows they have.
    """
    if isinstance(value, Tensor):
        return value if value.requires_grad else value.data
    if type(value) in (dict, list, tuple):
        return with_children(value, {key: uncoupled(item) for key, item in (children(value) or {}).items()})
    if _has_own_slices(value):
        for content in (getattr(value, "__dict__", {}), value if isinstance(value, dict) else {}):
            for key, item in list(content.items()):
                content[key] = uncoupled(item)
    return value


def leaves(tree: Any) -> Iterator[Any]:
    """All values in containers, in their order."""
    inside = children(tree)
    if inside is None:
        yield tree
        return
    for child in inside.values():
        yield from leaves(child)


def holds_arrays(tree: Any) -> bool:
    """Whether there is a tensor or an array in the containers."""
    return any(isinstance(leaf, Array) for leaf in leaves(tree))


def _copied(mapping: Any, values: dict[Any, Any]) -> Any:
    other = copy(mapping)
    for key, value in values.items():
        other[key] = value
    return other


def _constructed(mapping: Any, values: dict[Any, Any]) -> Any:
    if is_dataclass(mapping) and not isinstance(mapping, type):
        return replace(mapping, **values)
    made = type(mapping)(values)
    if made.keys() != values.keys() or not _hold_the_same(type(mapping)(dict(mapping)), mapping):
        raise TypeError("__init__ does not take all that it stores")
    return made


def _hold_the_same(one: Any, other: Any) -> bool:
    """Whether two values have the same items and attributes; of tensors, the same shapes."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Array):
        return bool(one.shape == other.shape)
    inside, others = ((children(value) or {}) | getattr(value, "__dict__", {}) for value in (one, other))
    if inside.keys() != others.keys() or not all(_hold_the_same(item, others[key]) for key, item in inside.items()):
        return False
    return bool(inside) or one.__eq__(other) is not False  # NotImplemented: objects without values to compare


def sizes(samples: int, microbatches: int) -> list[int]:
    """Return the sizes of the micro-batches: they differ by at most one, larger ones first, none is empty."""
    count = max(1, min(samples, microbatches))
    return [samples // count + (i < samples % count) for i in range(count)]


def uneven_sizes(samples: int, microbatches: int) -> list[int]:
    """Return sizes that aren't all the same, where that is possible with at most so many micro-batches.

    Single samples are avoided: BatchNorm can't normalise one.
    """
    even = sizes(samples, microbatches)
    count, size = len(even), even[0]
    fewer = sizes(samples, count - 1) if count > 2 else even
    if count == 1 or even[-1] < size:
        return even
    if size <= 2 and fewer[-1] < fewer[0]:
        return fewer
    return [size + 1, *even[1:-1], size - 1] if size > 1 else even


def signature(batch: Any, parts: Sequence[Sequence[int]], kind: str) -> int:
    """Return a number that is equal for batches of the same shapes, cut the same way for the same kind of step."""
    shapes = [(tuple(leaf.shape), str(leaf.dtype)) for leaf in leaves(batch) if isinstance(leaf, Array)]
    return seed_of(kind, [list(sizes) for sizes in parts], shapes)

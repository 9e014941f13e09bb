"""Reads a batch: how many samples it has, and how each value in it is cut.

A batch has N samples for the N of which all its tensors make sense. The first tensor with more than one row leaves few
candidates: its number of rows, and the lengths of the lists around it. docs/guides/batches.md has the rules.
A list of tensors or containers holds columns, with one row for each sample, or samples:

[x [8, 16], y [8]]   columns      [[2, 16], [5, 16], [3, 16]]   samples of different lengths

Images of all samples in one tensor of patches, and videos likewise, as processors of Qwen2-VL and others make them.

input_ids         [2, 9]    . . I I I I . I I   . I I I I . . . .    6 image tokens in sample 0, 4 in sample 1
image_grid_thw    [3, 3]    4 x 4 and 2 x 4     4 x 4                so sample 0 has two images, sample 1 has one
pixel_values      [40, h]   rows 0 to 23        rows 24 to 39

An image has as many tokens as patches, divided by one number (4 here): where a sample's tokens end, an image must end.
"""

import warnings
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from numbers import Number
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.microbatches import (
    ONE_LOADER,
    WHOLE,
    Array,
    Attribute,
    BatchPlan,
    BatchRule,
    BatchSource,
    Cut,
    Inside,
    Items,
    Part,
    Ragged,
    Rows,
    children,
    holds_arrays,
    joined,
    leaves,
    own_rows,
)


class _Kind(NamedTuple):
    """Keys and tokens of images, or of videos, in the batches of processors."""

    name: str
    patches: str
    """the patches [patches, ...]"""
    shapes: str
    """the numbers of patches in time, height and width [images, 3]"""
    others: tuple[str, ...]
    """values with an entry for each image"""
    token_type: int
    """of its tokens in `mm_token_type_ids`"""
    token_id: str
    """of its tokens in `input_ids`: the name in a model's config"""


_KINDS = (
    _Kind("image", "pixel_values", "image_grid_thw", ("image_merge_sizes",), 1, "image_token_id"),
    _Kind(
        "video",
        "pixel_values_videos",
        "video_grid_thw",
        ("video_merge_sizes", "second_per_grid_ts", "video_second_per_grid"),
        2,
        "video_token_id",
    ),
)


def patch_cuts(batch: Any, rule: BatchRule, module: nn.Module | None) -> dict[int, Ragged]:
    """Return how patches, and the other values with rows for images, are cut, by their ids.

    Args:
        batch: in which containers hold patches and tokens [batch, seq] by their usual keys.
        rule: how it is cut.
        module: whose configs name the tokens of batches without `mm_token_type_ids`.

    Raises:
        UnsupportedError: the tokens of images aren't known, or those of a sample aren't those of whole images.
    """
    items = {} if isinstance(batch, list) else children(batch) or {}  # a list's items may be samples
    found: dict[int, Ragged] = {}
    for key, item in items.items():
        if not rule.keeps_whole(key):
            found |= patch_cuts(item, rule, module)
    for kind in _KINDS:
        patches, shapes = items.get(kind.patches), items.get(kind.shapes)
        if rule.keeps_whole(kind.patches) or not isinstance(patches, Array) or not isinstance(shapes, Array):
            continue
        if shapes.ndim != 2 or shapes.shape[1] != 3:
            continue
        sizes = torch.as_tensor(shapes).prod(1).tolist()
        if sum(sizes) != len(patches):
            continue  # each image has the patches of the largest one
        ends = _image_ends(sizes, _token_counts(items, kind, rule, module), kind)
        found[id(patches)] = Ragged(tuple([0, *accumulate(sizes)][end] for end in ends))
        for key in (kind.shapes, *kind.others):
            if isinstance(items.get(key), Array | list) and len(items[key]) == len(sizes):
                found[id(items[key])] = Ragged(ends)
    return found


def _token_counts(items: Mapping[Any, Any], kind: _Kind, rule: BatchRule, module: nn.Module | None) -> list[int]:
    """The number of tokens of this kind in each sample."""
    types, ids = items.get("mm_token_type_ids"), items.get("input_ids")
    tokens: Any = types
    wanted: set[Any] = {kind.token_type}
    if not isinstance(types, Array):
        configs = (getattr(part, "config", None) for part in (() if module is None else module.modules()))
        named = (getattr(config, kind.token_id, None) for config in configs)
        tokens, wanted = ids, {token for token in named if isinstance(token, int)}
    if not isinstance(tokens, Array) or len(wanted) != 1:
        missing = f"no model's config has {kind.token_id}" if isinstance(ids, Array) else "no input_ids"
        raise UnsupportedError(
            f"whose the patches in {kind.patches} are isn't known: there are no mm_token_type_ids, and {missing}. Add "
            "mm_token_type_ids [batch, seq] (0: text, 1: image, 2: video), or use HanayoStrategy(split_batch=...)."
        )
    is_token = torch.as_tensor(tokens) == wanted.pop()
    dim = rule.sample_dim(is_token.ndim)
    counts: list[int] = is_token.movedim(dim, 0).reshape(is_token.shape[dim], -1).sum(1).tolist()
    return counts


def _image_ends(sizes: list[int], tokens: list[int], kind: _Kind) -> tuple[int, ...]:
    """For each sample, how many images it and those before it have.

    Args:
        sizes: of each image, in patches.
        tokens: the number of each sample's image tokens.
        kind: for messages.
    """
    num_patches, num_tokens = sum(sizes), sum(tokens)
    number_at = {patches * num_tokens: number for number, patches in enumerate((0, *accumulate(sizes)))}
    ends = [number_at.get(count * num_patches, -1) for count in accumulate(tokens)]
    if not num_tokens or -1 in ends:
        where = f"those of sample {ends.index(-1)} end inside one" if num_tokens else "there are none"
        raise UnsupportedError(
            f"{kind.patches} has the {num_patches} patches of {len(sizes)} {kind.name}s, and the samples' "
            f"{num_tokens} {kind.name} tokens ({', '.join(map(str, tokens))}) aren't those of whole {kind.name}s: "
            f"{where}. Check {kind.shapes} and the tokens, or use HanayoStrategy(split_batch=...)."
        )
    return tuple(ends)


def is_list(value: Any) -> bool:
    """A list or a tuple, but no named tuple."""
    return isinstance(value, (list, tuple)) and children(value) is not None and not hasattr(value, "_fields")


def are_columns(items: Sequence[Any], cut: Cut) -> bool:
    """Whether items that can be cut look like columns.

    All in them is cut, and no container has a single number, or tensors of one dimension only, as samples do.
    """
    if not _cuts_all(cut):
        return False
    for inside in [list(_leaves_near_arrays(item)) for item in items if not isinstance(item, Array)]:
        has_numbers = any(not leaf.ndim if isinstance(leaf, Array) else leaf is not None for leaf in inside)
        if has_numbers or all(leaf.ndim < 2 for leaf in inside if isinstance(leaf, Array)):
            return False
    return True


def _cuts_all(cut: Cut) -> bool:
    return all(map(_cuts_all, cut.cuts.values())) if isinstance(cut, Inside) else cut != WHOLE


def _leaves_near_arrays(value: Any) -> Iterator[Any]:
    """The values in containers with tensors: a list of names is none of them."""
    items = children(value)
    if items is None:
        yield value
    elif holds_arrays(value):
        for item in items.values():
            yield from _leaves_near_arrays(item)


def _rows(items: Sequence[Any]) -> list[int]:
    return [leaf.shape[0] for leaf in leaves(items) if isinstance(leaf, Array) and leaf.ndim]


NamedArray = tuple[str, Any, tuple[int, ...]]
"""A tensor or array, with its key path before it, and the lengths of the lists around it behind it."""
Meaning = Literal["columns", "samples"] | int
"""The meaning of a list: columns of all samples, or samples. For a tensor: the dimension of its samples."""


class BatchReader:
    """Plans batches by one rule.

    A list's meaning may be doubtful in one batch and certain in others: three pictures with three channels, for
    example. Then it is that of an earlier batch; without one, columns, and a warning says so.
    """

    def __init__(self, rule: BatchRule, *, warns: bool = True) -> None:
        self.rule = rule
        self._warns = warns
        self._settled: dict[str, dict[str, Meaning]] = {}
        self._has_warned = False

    def plan(self, batch: Any, source: BatchSource = ONE_LOADER) -> BatchPlan:
        """The cut of a batch.

        Raises:
            HanayoError: it has neither tensors nor lists.
            UnsupportedError: its tensors don't agree on a number of samples, or something in it can't be cut.
        """
        sizes: list[int] = []
        cut = self._parts(batch, source.loaders, source, "batch", sizes)
        if not sizes:
            raise HanayoError(
                f"a batch of type {type(batch).__name__} has no tensor or list to cut into micro-batches. "
                f"Use {SPLIT_BATCH}."
            )
        return BatchPlan(cut, tuple(sizes))

    def _parts(self, value: Any, loaders: Any, source: BatchSource, path: str, sizes: list[int]) -> Cut:
        """Plan each loader's part on its own. A loader that has ended gives None, which stays."""
        items, of_loaders = children(value), children(loaders)
        if items is not None and of_loaders is not None and items.keys() == of_loaders.keys():
            inside = {key: (item, of_loaders[key], path + step_to(value, key)) for key, item in items.items()}
            return Inside({k: self._parts(item, one, source, p, sizes) for k, (item, one, p) in inside.items()})
        reading = self._read(value, source, path)
        if reading is None:
            return WHOLE
        sizes.append(reading.samples)
        return Part(len(sizes) - 1, reading.cut)

    def _read(self, batch: Any, source: BatchSource, path: str) -> "Reading | None":
        ragged = patch_cuts(batch, self.rule, source.module)
        arrays = [one for one in named_arrays(batch, self.rule, path) if id(one[1]) not in ragged]
        for where, array, _ in arrays:
            if isinstance(array, Tensor) and (array.is_nested or array.layout not in (torch.strided, torch.sparse_coo)):
                layout = "jagged or nested" if array.is_nested else str(array.layout)
                raise _uncuttable(f"{where} is a tensor with the layout {layout}", where)
        candidates = _candidates(batch, arrays, self.rule)
        if not candidates:
            check_opaque(batch, path)
            return None
        settled = self._settled.setdefault(source.stage, {})
        max_ndim = max((array.ndim for _, array, _ in arrays), default=0)
        readings = _Reader(self.rule, source, settled, path, max_ndim, ragged).readings(batch, candidates)
        if not readings or [one.cost for one in readings[1:2]] == [readings[0].cost]:
            raise disagreement(arrays, path, [reading.samples for reading in readings], self.rule)
        best, *others = readings
        if source.is_unbatched:
            self._check_unbatched(batch, best, path)
        doubtful = best.doubtful | {where: items for other in others for where, items in other.as_samples.items()}
        for where, items in doubtful.items():
            # Tuples of a few columns are usual: a collate_fn returns `(x, y)`. Lists are more often lists of samples.
            rows = next(iter(_rows(items)), 0)
            is_unusual = isinstance(items, list) or len(items) >= rows
            if self._warns and is_unusual and where not in settled and not source.is_collated:
                warnings.warn(
                    f"{where} is a list of {len(items)} items with {rows} rows each, which may be columns or "
                    f"samples; they are cut as columns. If they are samples, use {SPLIT_BATCH}.",
                    stacklevel=2,
                )
        settled.update({where: meaning for where, meaning in best.meanings.items() if where not in doubtful})
        return best

    def _check_unbatched(self, batch: Any, reading: "Reading", path: str) -> None:
        """Check that something says that the dataset has given a batch as it is, and not one sample.

        Raises:
            UnsupportedError: all tensors have one dimension, which may be that of the features.
        """
        values = list(_cut_values(batch, reading.cut))
        arrays = [value for value, _ in values if isinstance(value, Array)]
        if reading.samples < 2 or len(arrays) < len(values):
            return  # nothing to cut, or a list with an item for each sample
        shapes = [tuple(array.shape) for array in arrays]
        if all(array.ndim == 1 for array in arrays):
            raise UnsupportedError(
                f"{path} comes from a DataLoader with batch_size=None; all has one dimension: "
                f"{', '.join(map(str, shapes[:MAX_SHAPES]))}, as in one sample. {_READY} Otherwise set batch_size."
            )
        are_sequences = arrays[0].ndim == 2 and str(arrays[0].dtype).endswith(("int32", "int64"))
        if len(arrays) == 1 and not are_sequences and self._warns and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{path} comes from a DataLoader with batch_size=None. It is cut as a batch of {reading.samples} "
                f"samples, by its only tensor with rows, of shape {shapes[0]}. {_READY}",
                stacklevel=2,
            )


@dataclass
class Reading:
    """A batch read as one of `samples` samples."""

    samples: int
    cut: Cut = WHOLE
    cost: int = 0
    """the higher, the less usual"""
    meanings: dict[str, Meaning] = field(default_factory=dict)
    as_samples: dict[str, Sequence[Any]] = field(default_factory=dict)
    """lists read as samples, which might be columns"""
    doubtful: dict[str, Sequence[Any]] = field(default_factory=dict)
    """lists read as columns, which might be samples"""


class _Mismatch(Exception):
    """Something does not fit the number of samples."""


@dataclass
class _Reader:
    """Reads a batch as one of so many samples.

    Args:
        root: the path of a loader's part.
        max_ndim: the most dimensions that a tensor in it has. Tensors with fewer may have their samples in dimension 0.
        ragged: how patches are cut, by their ids.
    """

    rule: BatchRule
    source: BatchSource
    settled: Mapping[str, Meaning]
    root: str
    max_ndim: int
    ragged: Mapping[int, Ragged]
    reading: Reading = field(default_factory=lambda: Reading(0))

    def readings(self, batch: Any, candidates: Sequence[int]) -> list[Reading]:
        """All numbers of samples that make sense, the most usual reading first."""
        found = []
        for samples in candidates:
            reading = Reading(samples)
            try:
                reading.cut = replace(self, reading=reading).read(batch, self.root)
            except _Mismatch:
                continue
            found.append(reading)
        return sorted(found, key=lambda reading: reading.cost)

    def read(self, value: Any, path: str, key: Any = None) -> Cut:
        """How to cut `value`.

        Raises:
            _Mismatch: a tensor has another number of rows.
        """
        if self.rule.keeps_whole(key):
            return WHOLE
        if own := self.ragged.get(id(value)):
            if len(own.ends) != self.reading.samples:
                raise _Mismatch
            return own
        if isinstance(value, Array):
            return self._array(value, path)
        for dim in {self.rule.batch_dim, 0}:
            if own_rows(value, dim) == self.reading.samples:
                return Rows(dim)
        if is_list(value) and holds_arrays(value):
            return self._list(value, path)
        if is_list(value):  # such as names: cut if there is an item for each sample
            is_transposed = self.source.is_collated and all(isinstance(item, (list, tuple)) for item in value)
            is_cut = len(value) == self.reading.samples and self.settled.get(path) != "columns" and not is_transposed
            self.reading.meanings[path] = "samples" if is_cut else "columns"
            return Items(self._attributes(value, path)) if is_cut else self._container(value, path)
        if children(value) is None:
            check_opaque(value, path)
        return self._container(value, path)

    def _array(self, value: Any, path: str) -> Cut:
        if not value.ndim:
            return WHOLE
        dims = [self.rule.sample_dim(value.ndim), *([0] if value.ndim < self.max_ndim else [])]
        fitting = [dim for dim in dims if value.shape[dim] == self.reading.samples]
        if not fitting:
            if value.shape[dims[0]] == 1:
                return WHOLE
            raise _Mismatch
        settled = self.settled.get(path)
        dim = settled if isinstance(settled, int) and settled in fitting else fitting[0]
        self.reading.cost += dim not in (dims[0], settled)
        if len(fitting) == 1:
            self.reading.meanings[path] = dim
        return Rows(dim)

    def _list(self, value: Any, path: str) -> Cut:
        """A list that holds tensors: of columns if that is possible and usual, otherwise of samples."""
        columns: Reading | None = (inside := Reading(self.reading.samples))
        try:
            inside.cut = replace(self, reading=inside)._container(value, path)
        except _Mismatch:
            columns = None
        is_clean = columns is not None and are_columns(value, columns.cut)
        is_returned = path == self.root and isinstance(value, tuple)  # by the collate_fn: `return x, y`
        kinds = {(type(item), item.ndim, item.dtype) if isinstance(item, Array) else type(item) for item in value}
        fits = len(value) == self.reading.samples and len(kinds - {type(None)}) <= 1
        may_be_samples = fits and not is_returned and (columns is None or not self.source.is_collated)
        settled = self.settled.get(path)
        if may_be_samples and (columns is None or settled == "samples" or not (is_clean or settled == "columns")):
            self.reading.cost += (settled != "samples") + 2 * (settled == "columns")
            self.reading.meanings[path] = "samples"
            if len(set(_rows(value))) <= 1:  # otherwise tensors of different lengths can't be columns
                self.reading.as_samples[path] = value
            return Items(self._attributes(value, path))
        if columns is None:
            raise _Mismatch
        self.reading.cost += columns.cost + 2 * (not is_clean) + 2 * (settled == "samples")
        self.reading.meanings |= columns.meanings | {path: "columns"}
        self.reading.as_samples |= columns.as_samples
        self.reading.doubtful |= columns.doubtful | ({path: value} if may_be_samples else {})
        return columns.cut

    def _attributes(self, value: Any, path: str) -> dict[Any, Cut]:
        """How the attributes of a list are cut."""
        stored = {} if type(value) in (list, tuple) else children(value) or {}
        of_list = ((key, item) for key, item in stored.items() if isinstance(key, Attribute))
        return {key: self.read(item, path + step_to(value, key), key) for key, item in of_list}

    def _container(self, value: Any, path: str) -> Cut:
        items = (children(value) or {}).items()
        return joined({key: self.read(item, path + step_to(value, key), key) for key, item in items})


def _cut_values(value: Any, cut: Cut) -> Iterator[tuple[Any, Cut]]:
    """The tensors and lists that are cut, with how."""
    if isinstance(cut, Inside):
        items = children(value) or {}
        for key, inside in cut.cuts.items():
            yield from _cut_values(items[key], inside)
    elif cut != WHOLE:
        yield value, cut


def _candidates(batch: Any, arrays: Sequence[NamedArray], rule: BatchRule) -> list[int]:
    """The numbers of samples that explain the first tensor with more than one row; without one, 1 is possible too.

    Without tensors: the length of the lists, if it is one.
    """
    numbers: list[int] = []
    for _, value, lengths in sorted(arrays, key=lambda one: -one[1].ndim) if rule.batch_dim else arrays:
        if value.ndim and value.shape[rule.sample_dim(value.ndim)] != 1:
            numbers = [value.shape[rule.sample_dim(value.ndim)], *lengths]
            break
        numbers = [*numbers, *lengths, *([1] if value.ndim else [])]
    of_lists = set(_lengths(batch, rule))
    return list(dict.fromkeys(numbers)) or (list(of_lists) if len(of_lists) == 1 else [])


def _lengths(value: Any, rule: BatchRule) -> Iterator[int]:
    """The lengths of the outermost lists that may be cut."""
    length = len(value) if is_list(value) else own_rows(value, 0)
    if length is not None:
        yield length
        return
    for key, item in (children(value) or {}).items():
        if not rule.keeps_whole(key):
            yield from _lengths(item, rule)


SPLIT_BATCH = "HanayoStrategy(split_batch=lambda batch, n: ...), a function that returns at most n micro-batches"
_READY = "If it is a batch, say so by DataLoader(collate_fn=lambda batch: batch)."
MAX_SHAPES = 12
"""how many shapes a message lists"""


def step_to(container: Any, key: Any) -> str:
    """How Python code gets from a container to an item."""
    if isinstance(key, Attribute):
        return f".{key.name}"
    return f"[{key!r}]" if isinstance(container, Mapping) or isinstance(key, int) else f".{key}"


def check_opaque(value: Any, path: str) -> None:
    """Reject an object that is no container and holds tensors: other values in it may depend on the samples.

    Raises:
        UnsupportedError: it does.
    """
    if isinstance(value, (str, bytes, Number, type(None))):  # most values: they need no search
        return
    attributes = dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, type) else {}
    declared = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for slots in declared for name in ((slots,) if isinstance(slots, str) else slots)]
    slots = {name: getattr(value, name, None) for name in names}
    items = list(value) if isinstance(value, (set, frozenset, deque)) else []
    if isinstance(value, PackedSequence) or holds_arrays([attributes, slots, items]):
        raise _uncuttable(f"{path} is a {type(value).__qualname__} that holds tensors", path)


def disagreement(arrays: Sequence[NamedArray], path: str, possible: list[int], rule: BatchRule) -> UnsupportedError:
    """The error for tensors that don't agree on a number of samples, with all shapes by key path.

    Args:
        arrays: of a batch, or of one loader's part of it.
        path: of it, in Python.
        possible: the numbers of samples that would explain all tensors, if there are several.
        rule: how it was to be cut.
    """
    shapes = {where: tuple(array.shape) for where, array, _ in arrays}
    shown = [f"{where} {shape}" for where, shape in shapes.items()]
    rest = f" and {len(shown) - MAX_SHAPES} more" if len(shown) > MAX_SHAPES else ""
    numbers = f"may have {' or '.join(map(str, sorted(possible)))} samples"
    problem = numbers if possible else "has tensors with different numbers of rows"
    ways = [SPLIT_BATCH] if rule.batch_dim else ["HanayoStrategy(batch_dim=1) if it is sequence-first", SPLIT_BATCH]
    # the tensors whose rows differ from those of most others may be whole
    rows = {where: shape[rule.sample_dim(len(shape))] for where, shape in shapes.items() if shape}
    counts = Counter(rows.values()).most_common(2)
    odd = tuple(dict.fromkeys(_name(where) for where, size in rows.items() if size not in (counts[0][0], 1)))
    is_even = len(counts) == 2 and counts[0][1] == counts[1][1]
    if "" not in odd and 0 < len(odd) <= 3 and not is_even:
        ways.insert(0, f"HanayoStrategy(whole={odd!r}) if all samples share {'it' if len(odd) == 1 else 'them'}")
    return UnsupportedError(
        f"{path} {problem}, and can't be cut into micro-batches: {', '.join(shown[:MAX_SHAPES])}{rest}. "
        f"Use {', or '.join(ways)}."
    )


def _uncuttable(what: str, path: str) -> UnsupportedError:
    whole = f", or HanayoStrategy(whole=({_name(path)!r},)) if all samples share it" if _name(path) else ""
    return UnsupportedError(f"{what}, which can't be cut into micro-batches. Use {SPLIT_BATCH}{whole}.")


def _name(path: str) -> str:
    """The key or field that a path ends with; "" for an index, and for the batch itself."""
    last = path.replace("]", "").replace("[", ".").rpartition(".")[2].strip("'")
    return "" if last.isdigit() or last == path else last


def named_arrays(value: Any, rule: BatchRule, path: str, lengths: tuple[int, ...] = ()) -> Iterator[NamedArray]:
    """All tensors and arrays that may be cut."""
    if isinstance(value, Array):
        yield path, value, lengths
        return
    around = (*lengths, len(value)) if is_list(value) else lengths
    for key, item in (children(value) or {}).items():
        if not rule.keeps_whole(key):
            yield from named_arrays(item, rule, path + step_to(value, key), around)

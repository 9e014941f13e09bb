"""Reads a batch: how many samples it has, and what in it is cut how.

A batch has N samples for the N of which all its tensors make sense. The first tensor with more than one row leaves few
candidates: its number of rows, and the lengths of the lists around it. docs/guides/batches.md has the rules.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.runtime.batches.containers import Array, Attribute, children, holds_arrays, own_rows
from lightning_hanayo.runtime.batches.lists import (
    ListShape,
    are_alike,
    are_columns,
    is_list,
    is_ragged,
    shape_of,
    warn_of_doubt,
)
from lightning_hanayo.runtime.batches.plan import (
    ONE_LOADER,
    WHOLE,
    BatchPlan,
    BatchRule,
    BatchSource,
    Cut,
    Inside,
    Items,
    Part,
    Rows,
    joined,
)
from lightning_hanayo.runtime.batches.refusal import (
    SPLIT_BATCH,
    check_layout,
    check_opaque,
    disagreement,
    step_to,
    unbatched,
    warn_of_unbatched,
)

Meaning = Literal["columns", "samples"] | int
"""What a list holds: columns of all samples, or samples. For a tensor: the dimension of its samples."""


class BatchReader:
    """Plans batches by one rule.

    What a list holds may be doubtful in one batch and certain in others: three pictures with three channels, for
    example. Then it holds what it has held in an earlier batch; without one, columns, and a warning says so.
    """

    def __init__(self, rule: BatchRule, *, warns: bool = True) -> None:
        self.rule = rule
        self._warns = warns
        self._settled: dict[str, dict[str, Meaning]] = {}
        self._has_warned = False

    def plan(self, batch: Any, source: BatchSource = ONE_LOADER) -> BatchPlan:
        """Decide how to cut a batch.

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
        candidates = _candidates(batch, self.rule, path)
        if not candidates:
            check_opaque(batch, path)
            return None
        settled = self._settled.setdefault(source.stage, {})
        readings = _readings(batch, candidates, self.rule, source, settled, path)
        if not readings or [one.cost for one in readings[1:2]] == [readings[0].cost]:
            possible = [reading.samples for reading in readings]
            raise disagreement(batch, path, possible, self.rule, is_sequence_first=self._is_sequence_first(batch))
        best, *others = readings
        if source.is_unbatched:
            self._check_unbatched(batch, best, path)
        doubtful = best.doubtful | {where: shape for other in others for where, shape in other.as_samples.items()}
        for where, shape in doubtful.items():
            if self._warns and where not in settled and not source.is_collated:
                warn_of_doubt(where, shape)
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
            raise unbatched(path, shapes)
        are_sequences = arrays[0].ndim == 2 and str(arrays[0].dtype).endswith(("int32", "int64"))
        if len(arrays) == 1 and not are_sequences and self._warns and not self._has_warned:
            self._has_warned = True
            warn_of_unbatched(path, shapes[0], reading.samples)

    def _is_sequence_first(self, batch: Any) -> bool:
        """Whether the tensors with the most dimensions agree along dimension 1, and the others make sense."""
        rule = replace(self.rule, batch_dim=1)
        readings = _readings(batch, _candidates(batch, rule, "batch"), rule, ONE_LOADER, {}, "batch")
        shapes = [value.shape for value, _ in _arrays(batch, rule, "batch")]
        largest = {shape[1:2] for shape in shapes if len(shape) == max(map(len, shapes))}
        return self.rule.batch_dim == 0 and bool(readings) and largest == {(readings[0].samples,)}


@dataclass
class Reading:
    """A batch read as one of `samples` samples."""

    samples: int
    cut: Cut = WHOLE
    cost: int = 0
    """the higher, the less usual"""
    meanings: dict[str, Meaning] = field(default_factory=dict)
    as_samples: dict[str, ListShape] = field(default_factory=dict)
    """lists read as samples, which might be columns"""
    doubtful: dict[str, ListShape] = field(default_factory=dict)
    """lists read as columns, which might be samples"""


class _Mismatch(Exception):
    """Something does not fit the number of samples."""


@dataclass
class _Reader:
    """Reads a batch as one of so many samples.

    Args:
        root: the path of what a loader gave.
        max_ndim: the most dimensions that a tensor in it has. Tensors with fewer may have their samples in dimension 0.
    """

    rule: BatchRule
    source: BatchSource
    settled: Mapping[str, Meaning]
    root: str
    max_ndim: int
    reading: Reading

    def read(self, value: Any, path: str, key: Any = None) -> Cut:
        """How to cut `value`.

        Raises:
            _Mismatch: a tensor has another number of rows.
        """
        if self.rule.keeps_whole(key):
            return WHOLE
        if isinstance(value, Array):
            return self._array(value, path)
        for dim in {self.rule.batch_dim, 0}:
            if own_rows(value, dim) == self.reading.samples:
                return Rows(dim)
        if is_list(value):
            return self._list(value, path) if holds_arrays(value) else self._plain_list(value, path)
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
        columns = self._as_columns(value, path)
        is_clean = columns is not None and are_columns(value, columns.cut)
        is_returned = path == self.root and isinstance(value, tuple)  # by the collate_fn: `return x, y`
        fits = len(value) == self.reading.samples and are_alike(value)
        may_be_samples = fits and not is_returned and (columns is None or not self.source.is_collated)
        settled = self.settled.get(path)
        if may_be_samples and (columns is None or settled == "samples" or not (is_clean or settled == "columns")):
            self.reading.cost += (settled != "samples") + 2 * (settled == "columns")
            self.reading.meanings[path] = "samples"
            if not is_ragged(value):
                self.reading.as_samples[path] = shape_of(value)
            return Items(self._attributes(value, path))
        if columns is None:
            raise _Mismatch
        self.reading.cost += columns.cost + 2 * (not is_clean) + 2 * (settled == "samples")
        self.reading.meanings |= columns.meanings | {path: "columns"}
        self.reading.as_samples |= columns.as_samples
        self.reading.doubtful |= columns.doubtful | ({path: shape_of(value)} if may_be_samples else {})
        return columns.cut

    def _as_columns(self, value: Any, path: str) -> Reading | None:
        inside = replace(self, reading=Reading(self.reading.samples))
        try:
            inside.reading.cut = inside._container(value, path)
        except _Mismatch:
            return None
        return inside.reading

    def _plain_list(self, value: Any, path: str) -> Cut:
        """A list without tensors, such as names: cut if it has an item for each sample."""
        is_transposed = self.source.is_collated and all(isinstance(item, (list, tuple)) for item in value)
        if len(value) == self.reading.samples and self.settled.get(path) != "columns" and not is_transposed:
            self.reading.meanings[path] = "samples"
            return Items(self._attributes(value, path))
        self.reading.meanings[path] = "columns"
        return self._container(value, path)

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


def _readings(
    batch: Any,
    candidates: Sequence[int],
    rule: BatchRule,
    source: BatchSource,
    settled: Mapping[str, Meaning],
    path: str,
) -> list[Reading]:
    """All numbers of samples that make sense, the most usual reading first."""
    found = []
    max_ndim = max((value.ndim for value, _ in _arrays(batch, rule, path)), default=0)
    for samples in candidates:
        reading = Reading(samples)
        try:
            reading.cut = _Reader(rule, source, settled, path, max_ndim, reading).read(batch, path)
        except _Mismatch:
            continue
        found.append(reading)
    return sorted(found, key=lambda reading: reading.cost)


def _candidates(batch: Any, rule: BatchRule, path: str) -> list[int]:
    """The numbers of samples that explain the first tensor with more than one row; without one, 1 is possible too.

    Without tensors: the length of the lists, if it is one.
    """
    numbers: list[int] = []
    arrays = _arrays(batch, rule, path)
    for value, lengths in sorted(arrays, key=lambda pair: -pair[0].ndim) if rule.batch_dim else arrays:
        if value.ndim and value.shape[rule.sample_dim(value.ndim)] != 1:
            numbers = [value.shape[rule.sample_dim(value.ndim)], *lengths]
            break
        numbers = [*numbers, *lengths, *([1] if value.ndim else [])]
    of_lists = set(_lengths(batch, rule))
    return list(dict.fromkeys(numbers)) or (list(of_lists) if len(of_lists) == 1 else [])


def _arrays(value: Any, rule: BatchRule, path: str, lengths: tuple[int, ...] = ()) -> Iterator[tuple[Any, Any]]:
    """All tensors that may be cut, each with the lengths of the lists around it."""
    if isinstance(value, Array):
        check_layout(value, path)
        yield value, lengths
        return
    around = (*lengths, len(value)) if is_list(value) else lengths
    for key, item in (children(value) or {}).items():
        if not rule.keeps_whole(key):
            yield from _arrays(item, rule, path + step_to(value, key), around)


def _lengths(value: Any, rule: BatchRule) -> Iterator[int]:
    """The lengths of the outermost lists that may be cut."""
    length = len(value) if is_list(value) else own_rows(value, 0)
    if length is not None:
        yield length
        return
    for key, item in (children(value) or {}).items():
        if not rule.keeps_whole(key):
            yield from _lengths(item, rule)

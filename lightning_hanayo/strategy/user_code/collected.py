"""What steps collect in lists and attributes: found, merged over micro-batches, and given to the other ranks' hooks.

`Collections` compares the module before and after each micro-batch's step, outside the blocks:

    self.outputs.append(loss)       step 0: outputs = [a]    step 1: outputs = [a, b]     ->  "append" a to 0, b to 1
    self.last_scores = scores       step 0: last = s         step 1: last = t             ->  "set" s by 0, t by 1

`CollectedMerge` merges these changes, as if the step had run once on the whole batch:

                             micro-batch 0    micro-batch 1      the list, or the attribute
an entry for each sample     [3, classes]     [2, classes]       [5, classes]
the step's loss, logged      0.4              0.6                their mean, with the weights of the micro-batches
items, one for each sample   1, 7, 3          5, 2               1, 7, 3, 5, 2
other numbers                4                2                  4, 2: a list gets one for each micro-batch, and a
                                                                 warning names it
"""

import operator
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError, listed
from lightning_hanayo.partition.guards import MissingValues
from lightning_hanayo.pipeline_parallel.batches.merge import HostNumbers, PieceSizes
from lightning_hanayo.pipeline_parallel.batches.microbatches import Array, Attribute, children, leaves, with_children
from lightning_hanayo.pipeline_parallel.batches.reader import step_to
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import Valueless, user_line
from lightning_hanayo.pipeline_parallel.capture.state import INTERNAL, LIBRARIES, MAX_LENGTH, PLAIN, is_metric
from lightning_hanayo.pipeline_parallel.stages import detach_tree, find_loss
from lightning_hanayo.strategy.batch_split import SplitBatch
from lightning_hanayo.strategy.losses import PieceWeights
from lightning_hanayo.versions import version_of


class Missing(Valueless):
    """A value that this rank doesn't have; every use raises an error that names it, the reason, and the way out."""

    __slots__ = ("_what", "_way_out", "_why")

    def __init__(self, what: str, why: str, way_out: str) -> None:
        self._what, self._why, self._way_out = what, why, way_out

    def __repr__(self) -> str:
        """Its name and the reason."""
        return f"<{self._what}: {self._why}>"

    def __reduce__(self) -> Any:
        """A copy is missing, too."""
        return Missing, (self._what, self._why, self._way_out)

    @override
    def refuse(self, operation: str) -> NoReturn:
        raise UnsupportedError(f"{user_line()} reads {self._what} ({operation}), but {self._why}. {self._way_out}.")


def hide_changed(batch: Any, before: Sequence[Any], pieces: Sequence[Any]) -> None:
    """Put stand-ins into `batch` for the entries that steps have set in their `pieces`, or removed: each its own.

    `before`: the children of the pieces before the steps.
    """
    changed: dict[Any, None] = {}
    for old, piece in zip(before, pieces, strict=True):
        if old is not None and piece is not batch:
            new = children(piece) or {}
            keys = (key for key in old | new if not isinstance(key, Attribute))
            changed |= {key: None for key in keys if key not in old or new.get(key) is not old[key]}
    for key in changed:
        name = f"batch{step_to(batch, key)}"
        value = Missing(name, "each step has set its own", "Store it as an attribute of the module, or return it")
        if not isinstance(batch, MutableMapping | list):
            object.__setattr__(batch, key, value)
            continue
        try:
            batch[key] = value
        except Exception:  # the user's class takes tensors only, or a list has grown
            if not isinstance(batch, list):
                batch.pop(key, None)


def sent_or_own(value: Any, own: Any) -> Any:
    """The value that pipeline rank 0 has sent, or this rank's own where the other has none.

    A hook on all ranks may have kept each parameter, or something computed from it such as its moving average: each
    rank has those of its own parameters.
    """
    if isinstance(value, dict) and isinstance(own, dict):
        pairs = {key: (item, own.get(key, item)) for key, item in value.items()}
        # A module or a function can't be sent, but this rank has it, too.
        return {key: mine if isinstance(it, Missing) else sent_or_own(it, mine) for key, (it, mine) in pairs.items()}
    if isinstance(value, list) and isinstance(own, list) and len(value) == len(own):
        return [sent_or_own(*pair) for pair in zip(value, own, strict=True)]
    if not isinstance(own, Tensor) or not isinstance(value, Missing | Tensor):
        return value
    is_own = isinstance(own, nn.Parameter) or isinstance(value, Missing)
    return own if is_own or (isinstance(value, MissingValues) and value._owner.rank > 0) else value


Path = tuple[Any, ...]
"""The name of an owner, an attribute, and keys of the containers in it."""
_DEPTH = 3
_MANY = 16
"""longer lists are data, in which no lists are looked for"""
_LEAVES = (bool, int, float, str, type(None), Tensor, np.ndarray, np.generic)


class Change(Enum):
    """Stands for a value that isn't kept."""

    MUTATED = "a tensor that was changed in place"


MUTATED = Change.MUTATED


@dataclass
class Left:
    """The changes of one micro-batch's step: items by the list that they were appended to, and values by key."""

    appended: dict[Path, list[Any]] = field(default_factory=dict)
    assigned: dict[Path, Any] = field(default_factory=dict)
    used_collectives: bool = False
    """whether it has seen values of other ranks, so that all of them may have left the same"""
    means: list[Any] = field(default_factory=list)
    """numbers that the step has returned, or logged as means"""
    loss: Tensor | None = None
    """that it has returned"""

    def note_means(self, result: Any, logged: Iterable[Any]) -> None:
        """Keep the numbers that may be means over the step's samples, if there are changes to compare with them."""
        if self.appended or self.assigned:
            self.means = [value for value in (*leaves(result), *logged) if is_mean(value)]
            self.loss = find_loss(detach_tree(result))
            self.appended = {path: detach_tree(items) for path, items in self.appended.items()}


def is_mean(value: Any) -> bool:
    """Whether it may be a mean over samples: a number that isn't an integer."""
    if isinstance(value, Tensor):
        return value.ndim == 0 and value.is_floating_point()
    return isinstance(value, float | np.floating) or (isinstance(value, np.ndarray) and not value.ndim)


class Collections:
    """The attributes of one module that steps may collect in.

    Args:
        module: the user's.
        outside: its modules that aren't in blocks.
    """

    def __init__(self, module: "pl.LightningModule", outside: Iterable[nn.Module]) -> None:
        self._internal = INTERNAL | vars(pl.LightningModule()).keys() | {"training"}
        self.watch(module, outside)
        self._lists: dict[Path, tuple[list[Any], int, Any]] = {}
        self._values: dict[Path, tuple[Any, int]] = {}
        self._starts: dict[Path, int] | None = None
        """how long lists were at the start of the batch; None: none has begun"""
        self._reset: set[Path] = set()
        self._left: dict[int, Left] = {}
        self._microbatch: int | None = None
        self._changed: set[Path] = set()
        """attributes that steps have changed since other pipeline ranks got them"""
        self._sent: dict[Path, tuple[int, Any]] = {}
        """of each list that other ranks got: how long it was, and its last item"""

    def watch(self, module: "pl.LightningModule", outside: Iterable[nn.Module]) -> None:
        """Watch these modules from now on. Arguments as for the constructor."""
        ids = {id(part) for part in outside if _is_users(part) and not is_metric(part)}  # a metric's hash changes
        named = module.named_modules(prefix="self")
        self._outside = [(name, part) for name, part in named if id(part) in ids]
        self._owners: dict[str, Any] | None = None
        """the objects that are watched; None: to be found"""

    def begin_batch(self) -> None:
        """Take note of the present values, to compare with them after each step."""
        self._starts, self._owners = None, None
        self.note_current()
        self._left, self._reset = {}, set()
        self._starts = {path: length for path, (_, length, _) in self._lists.items()}

    def enter(self, microbatch: int | None) -> None:
        """Called before user code of that micro-batch starts or continues; None: a dry run, which leaves nothing."""
        self._scan()
        self._microbatch = microbatch

    def end_batch(self, num_microbatches: int) -> list[Left]:
        """The changes of each micro-batch's step."""
        self._scan()
        self._microbatch = None
        for left in self._left.values():
            for path in self._reset & left.appended.keys():
                del left.appended[path]
        return [self._left.get(m, Left()) for m in range(num_microbatches)]

    def store(self, appended: Mapping[Path, list[Any]], assigned: Mapping[Path, Any]) -> None:
        """Replace the values that the steps have left by the merged ones."""
        for path, items in appended.items():
            self._resolve(path)[self._start(path) :] = items
        for path, value in assigned.items():
            self._resolve(path[:-1])[path[-1]] = value

    def take_changed(self) -> dict[Path, tuple[int, Any]]:
        """The attributes that have changed since the last call, by owner and name; of a list its new items."""
        self._scan()
        changed, self._changed = self._changed, set()
        taken: dict[Path, tuple[int, Any]] = {}
        for path in sorted(changed):
            attributes = vars(self.owners()[path[0]])
            if path[1] not in attributes:
                continue
            value, start = attributes[path[1]], 0
            if isinstance(value, list):
                length, last = self._sent.get(path, (0, None))
                if 0 < length <= len(value) and value[length - 1] is last:  # the same list, longer
                    start = length
                self._sent[path] = len(value), value[-1] if value else None
                value = value[start:]
            taken[path] = start, value
        return taken

    def note_current(self) -> None:
        """Take the present values for known on all pipeline ranks: a hook that runs on all of them has set them."""
        self._microbatch = None
        self._scan(is_known=True)

    def give(self, values: Mapping[Path, tuple[int, Any]]) -> None:
        """Set attributes that another rank has taken. Lists and dictionaries stay the objects that they are.

        Raises:
            UnsupportedError: a list isn't the same on this rank as on the other.
        """
        owners = self.owners()
        for path, (start, value) in values.items():
            attributes, name = vars(owners[path[0]]), path[1]
            known = attributes.get(name)
            if isinstance(value, list) and isinstance(known, list):
                if len(known) < start:
                    raise UnsupportedError(
                        f"{'.'.join(path)} has {len(known)} items on this rank, but pipeline rank 0, whose steps have "
                        f"appended to it, had {start} before them. Change it in hooks on all ranks alike."
                    )
                known[start:] = sent_or_own(value, known[start:])
            elif isinstance(value, dict) and isinstance(known, dict):
                value = sent_or_own(value, known)
                known.clear()
                known.update(value)
            else:
                attributes[name] = sent_or_own(value, attributes.get(name, value))

    def owners(self) -> dict[str, Any]:
        """The objects whose attributes are watched, by name: modules outside the stack, and plain objects in them."""
        if self._owners is None:
            self._owners = {}
            for name, part in self._outside:
                self._owners[name] = part
                for key, value in vars(part).items():
                    is_object = hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)
                    if key not in self._internal and is_object and _is_users(value):
                        self._owners[f"{name}.{key}"] = value
        return self._owners

    def _start(self, path: Path) -> int:
        """How long the list was when the batch began; before the first batch all short lists are searched."""
        return _MANY if self._starts is None else self._starts.get(path, 0)

    def _resolve(self, path: Path) -> Any:
        container: Any = vars(self.owners()[path[0]])
        for key in path[1:]:
            container = container[key]
        return container

    def _scan(self, *, is_known: bool = False) -> None:
        """Find the changes since the last scan, and attribute them to the micro-batch whose step has run."""
        lists: dict[Path, tuple[list[Any], int, Any]] = {}
        values: dict[Path, tuple[Any, int]] = {}
        for path, value in self._walk():
            if isinstance(value, list):
                lists[path] = value, len(value), value[-1] if value else None
                if not is_known:
                    self._note_list(path, value)
                continue
            values[path] = value, version_of(value) if isinstance(value, Tensor) else 0
            known = self._values.get(path, (MUTATED, 0))
            if not is_known and (value is not known[0] or values[path][1] != known[1]):
                self._changed.add(path[:2])
                if self._microbatch is not None:
                    self._current.assigned[path] = MUTATED if value is known[0] else detach_tree(value)
        self._lists, self._values = lists, values

    def _note_list(self, path: Path, container: list[Any]) -> None:
        known, length, last = self._lists.get(path, (container, 0, None))
        # `self.outputs = [*self.outputs, new]` makes a new list, but appends.
        is_other = known is not container and not (
            len(container) >= len(known) and all(map(operator.is_, container, known))
        )
        if is_other or len(container) < length or (length and container[length - 1] is not last):
            self._reset.add(path)
            self._changed.add(path[:2])
            if self._microbatch is not None and is_other:
                self._current.assigned[path] = detach_tree(list(container))
        elif len(container) > length:
            self._changed.add(path[:2])
            if self._microbatch is None:
                return
            if path in self._current.assigned:
                self._current.assigned[path] = detach_tree(list(container))
            else:
                self._current.appended.setdefault(path, []).extend(container[length:])

    @property
    def _current(self) -> Left:
        assert self._microbatch is not None
        return self._left.setdefault(self._microbatch, Left())

    def _walk(self) -> Iterator[tuple[Path, Any]]:
        """All lists, and all values in attributes and dictionaries."""
        for name, owner in self.owners().items():
            attributes = vars(owner)
            for key in attributes.keys() - self._internal:
                value = attributes[key]
                if isinstance(value, _LEAVES):
                    yield (name, key), value
                elif isinstance(value, list | dict):
                    yield from self._walk_value((name, key), value, _DEPTH)

    def _walk_value(self, path: Path, value: Any, depth: int) -> Iterator[tuple[Path, Any]]:
        if isinstance(value, (*_LEAVES, list)):
            yield path, value
        if depth and isinstance(value, dict) and len(value) <= MAX_LENGTH:
            for key, item in list(value.items()):
                yield from self._walk_value((*path, key), item, depth - 1)
        elif depth and isinstance(value, list) and len(value) <= _MANY:
            for index, item in enumerate(value[: self._start(path)]):  # later items are data
                if isinstance(item, list):
                    yield from self._walk_value((*path, index), item, depth - 1)


def _is_users(value: Any) -> bool:
    """Whether the class of an object isn't a library's."""
    return type(value).__module__.partition(".")[0] not in LIBRARIES


class _Apart(Exception):
    """The values of micro-batches can't be merged into one."""


@dataclass(eq=False)
class CollectedMerge:
    """Merges the pieces of one batch: micro-batches, or in a cube the ranks' shares of them."""

    left: Sequence[Left]
    """the changes of each piece's step, in the order of their samples"""
    microbatches: Sequence[int]
    """of each piece, its micro-batch"""
    sizes: PieceSizes
    """the samples of the pieces"""
    in_loss: Sequence[float]
    """each piece's weight in the loss"""
    in_mean: Sequence[float]
    """its weight in means"""
    number: HostNumbers = field(default_factory=HostNumbers)
    kept_apart: list[str] = field(default_factory=list, init=False)
    """names of lists and attributes that hold values of micro-batches, not of the batch"""

    def appended(self) -> dict[Path, list[Any]]:
        """The items that each list gets."""
        return {path: self._items(path) for path in _paths(one.appended for one in self.left)}

    def assigned(self) -> dict[Path, Any]:
        """The values that attributes and keys get, where they aren't those that the last micro-batch has left."""
        made: dict[Path, Any] = {}
        for path in _paths(one.assigned for one in self.left):
            values = [one.assigned.get(path, MUTATED) for one in self.left]
            set_by = [path in one.assigned for one in self.left]
            present = [value for value, is_set in zip(values, set_by, strict=True) if is_set]
            # Equal integers may be the pieces' sizes. A later piece of equal size doesn't count as setting it.
            sizes = [size for size, is_set in zip(self.sizes.parts[0], set_by, strict=True) if is_set]
            if _are_constant(present) and not (type(present[0]) is int and present == sizes):
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

    def _differ_between_ranks(self, values: Sequence[Any], set_by: Sequence[bool]) -> bool:
        """Whether the ranks that share a micro-batch have left different values for it."""
        rows: dict[int, list[int]] = {}
        for piece, microbatch in enumerate(self.microbatches):
            rows.setdefault(microbatch, []).append(piece)
        shared = [row for row in rows.values() if len(row) > 1 and any(set_by[i] for i in row)]
        return any(not _are_constant([values[i] for i in row]) for row in shared)

    def _items(self, path: Path) -> list[Any]:
        columns = [one.appended.get(path, []) for one in self.left]
        counts = [len(column) for column in columns]
        if len(columns) == 1:
            return columns[0]
        has_item_per_sample = set(counts) != {1} and any(counts == list(part) for part in self.sizes.parts)
        if self.sizes.are_known and has_item_per_sample:
            return [item for column in columns for item in column]
        if len(set(counts)) == 1:
            try:
                return [self._value(row) for row in zip(*columns, strict=True)]
            except _Apart:
                pass
        self.kept_apart.append(name_of(path))
        return [item for i, column in enumerate(columns) if not self._is_copy(i, path) for item in column]

    def _is_copy(self, piece: int, path: Path) -> bool:
        """Whether another rank of the cube has collected the same for this micro-batch, as a collective gave it.

        Raises:
            UnsupportedError: it has collected one number, which may be the same by chance.
        """
        first = self.microbatches.index(self.microbatches[piece])
        if first == piece or not self.left[piece].used_collectives:
            return False
        own, other = self.left[piece].appended.get(path, []), self.left[first].appended.get(path, [])
        is_copy = _are_equal(own, other)
        if is_copy and not any(isinstance(item, Array) and item.ndim for item in own):
            raise UnsupportedError(
                f"{name_of(path)}: a step that calls a collective has collected the number {own[0]} on several ranks "
                "of the cube, maybe one. Collect the ranks' own values, and sum over them at the epoch's end."
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
            dim = self.sizes.sample_dim(values)
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
        if self.number.are_whole(values):
            raise _Apart
        found = list(map(self.number, values))
        columns = zip(*(map(self.number, one.means) for one in self.left), strict=False)
        if not any(list(column) == found for column in columns):
            raise _Apart
        losses = [self.number(one.loss) for one in self.left if one.loss is not None and one.loss.numel() == 1]
        weights = self.in_loss if losses == found else self.in_mean
        parts = [value * weight for value, weight in zip(values, weights, strict=True) if weight]
        return sum(parts[1:], parts[0]) if parts else values[0]


def keep_collected(
    collections: Collections, split: SplitBatch, weights: PieceWeights, left: Sequence[Left], numbers: HostNumbers
) -> Sequence[str]:
    """Store the merged changes of the steps of a batch's pieces in the module, as if the step had run once.

    Returns the names of lists and attributes that hold values of micro-batches.
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
        number=numbers,
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
            f"{listed(names, 3)}: set by the step for each of the {num_microbatches} micro-batches of a batch. To get "
            "those of the batch, collect what the step also returns or logs.",
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

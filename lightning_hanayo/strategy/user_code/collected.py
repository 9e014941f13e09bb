"""Finds what the steps of a batch's micro-batches collect in lists and attributes, for the hooks that read it later.

    self.outputs.append(loss)       step 0: outputs = [a]    step 1: outputs = [a, b]     ->  "append" a to 0, b to 1
    self.last_scores = scores       step 0: last = s         step 1: last = t             ->  "set" s by 0, t by 1

What the micro-batches have left is merged afterwards (`merge_collected.py`). Only code outside the blocks is watched.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import lightning.pytorch as pl
import numpy as np
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.batches.containers import leaves
from lightning_hanayo.runtime.capture.holder import INTERNAL
from lightning_hanayo.runtime.capture.module_state import LIBRARIES, MAX_LENGTH, is_metric
from lightning_hanayo.runtime.stages.first_last import detach_tree, find_loss
from lightning_hanayo.strategy.user_code.stand_ins import sent_or_own
from lightning_hanayo.versions import version_of

Path = tuple[Any, ...]
"""The name of an owner, an attribute, and keys of the containers in it."""
_DEPTH = 3
_MANY = 16
"""longer lists hold what was collected, no lists"""
_LEAVES = (bool, int, float, str, type(None), Tensor, np.ndarray, np.generic)


class Change(Enum):
    """What is known of a value that isn't kept."""

    MUTATED = "a tensor that was changed in place"


MUTATED = Change.MUTATED


@dataclass
class Left:
    """What the step of one micro-batch has left: items by the list that they were appended to, and values by key."""

    appended: dict[Path, list[Any]] = field(default_factory=dict)
    assigned: dict[Path, Any] = field(default_factory=dict)
    used_collectives: bool = False
    """whether it has seen values of other ranks, so that all of them may have left the same"""
    means: list[Any] = field(default_factory=list)
    """numbers that the step has returned, or logged as means"""
    loss: Tensor | None = None
    """that it has returned"""

    def note_means(self, result: Any, logged: Iterable[Any]) -> None:
        """Keep what is known to be means over the step's samples, if anything may be compared with it."""
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
        """Take note of what there is, so that the changes of steps are known."""
        self._starts, self._owners = None, None
        self.note_current()
        self._left, self._reset = {}, set()
        self._starts = {path: length for path, (_, length, _) in self._lists.items()}

    def enter(self, microbatch: int | None) -> None:
        """Called before user code of that micro-batch starts or continues; None: a dry run, which leaves nothing."""
        self._scan()
        self._microbatch = microbatch

    def end_batch(self, num_microbatches: int) -> list[Left]:
        """What each micro-batch's step has left."""
        self._scan()
        self._microbatch = None
        for left in self._left.values():
            for path in self._reset & left.appended.keys():
                del left.appended[path]
        return [self._left.get(m, Left()) for m in range(num_microbatches)]

    def store(self, appended: Mapping[Path, list[Any]], assigned: Mapping[Path, Any]) -> None:
        """Put merged values in the place of what the steps have left."""
        for path, items in appended.items():
            container = self._resolve(path)
            del container[self._start(path) :]
            container.extend(items)
        for path, value in assigned.items():
            self._resolve(path[:-1])[path[-1]] = value

    def take_changed(self) -> dict[Path, tuple[int, Any]]:
        """The attributes that have changed since the last call, by owner and name; of a list its new items."""
        self._scan()
        changed, self._changed = self._changed, set()
        owners = self.owners()
        present = [path for path in sorted(changed) if path[1] in vars(owners[path[0]])]
        return {path: self._new_part(path, vars(owners[path[0]])[path[1]]) for path in present}

    def note_current(self) -> None:
        """What is there now is known on all pipeline ranks: a hook that runs on all of them has left it."""
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
            self._owners = self._find_owners()
        return self._owners

    def _find_owners(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, part in self._outside:
            found[name] = part
            for key, value in vars(part).items():
                is_object = hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)
                if key not in self._internal and is_object and _is_users(value):
                    found[f"{name}.{key}"] = value
        return found

    def _new_part(self, path: Path, value: Any) -> tuple[int, Any]:
        if not isinstance(value, list):
            return 0, value
        length, last = self._sent.get(path, (0, None))
        start = length if 0 < length <= len(value) and value[length - 1] is last else 0
        self._sent[path] = len(value), value[-1] if value else None
        return start, value[start:]

    def _start(self, path: Path) -> int:
        return _MANY if self._starts is None else self._starts.get(path, 0)

    def _resolve(self, path: Path) -> Any:
        container: Any = vars(self.owners()[path[0]])
        for key in path[1:]:
            container = container[key]
        return container

    def _scan(self, *, is_known: bool = False) -> None:
        """Find what has changed since the last scan, and attribute it to the micro-batch whose step has run."""
        lists: dict[Path, tuple[list[Any], int, Any]] = {}
        values: dict[Path, tuple[Any, int]] = {}
        for path, value in self._walk():
            if isinstance(value, list):
                lists[path] = value, len(value), value[-1] if value else None
            else:
                values[path] = value, version_of(value) if isinstance(value, Tensor) else 0
        if not is_known:
            for path, (container, *_) in lists.items():
                self._note_list(path, container)
            for path, value in values.items():
                self._note_value(path, *value)
        self._lists, self._values = lists, values

    def _note_list(self, path: Path, container: list[Any]) -> None:
        known, length, last = self._lists.get(path, (container, 0, None))
        is_other = known is not container and not _starts_with(container, known)  # self.outputs += or = self.outputs +
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

    def _note_value(self, path: Path, value: Any, version: int) -> None:
        known, known_version = self._values.get(path, (MUTATED, 0))
        if value is not known or version != known_version:
            self._changed.add(path[:2])
            if self._microbatch is not None:
                self._current.assigned[path] = MUTATED if value is known else detach_tree(value)

    @property
    def _current(self) -> Left:
        assert self._microbatch is not None
        return self._left.setdefault(self._microbatch, Left())

    def _walk(self) -> Iterator[tuple[Path, Any]]:
        """All lists, and all values in attributes and dictionaries."""
        for name, owner in self.owners().items():
            for key, value in vars(owner).items():
                if key in self._internal:
                    continue
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
            for index, item in enumerate(value[: self._start(path)]):  # what was appended since is data
                if isinstance(item, list):
                    yield from self._walk_value((*path, index), item, depth - 1)


def _starts_with(container: list[Any], known: list[Any]) -> bool:
    return len(container) >= len(known) and all(one is two for one, two in zip(container, known, strict=False))


def _is_users(value: Any) -> bool:
    """Whether the class of an object isn't a library's."""
    return type(value).__module__.partition(".")[0] not in LIBRARIES

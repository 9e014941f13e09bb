"""Holders of values: attributes of an object, or a list, dictionary or set; and what has changed in them.

Values are compared by identity, plain ones by value, and tensors also by their version, which counts changes in place.
Of a buffer that was changed in place only that is known: its values stay on their rank. Parameters are no state,
wherever they are kept: optimizers change them in place, and each rank has its own.
"""

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from typing import Any

from torch import Tensor, nn

from lightning_hanayo.versions import version_of

Key = tuple[str, str]
"""The name of a holder, and that of an attribute; `CONTENT` for the whole of a list or set."""
CONTENT = ""
REMOVED = object()
"""stands for the value of an attribute that was deleted"""
MUTATED = object()
"""stands for the value of a buffer that was changed in place"""
REPLACED = object()
"""stands for a module that was put in the place of another one"""
BUFFERS = "._buffers"
MODULES = "._modules"
PLAIN = (type(None), bool, int, float, str)
INTERNAL = frozenset(vars(nn.Module())) - {"training"}
"""attributes of every module that hold its parts and hooks"""


class Slots(MutableMapping[str, Any]):
    """The attributes of an object whose class has `__slots__`, as a mapping."""

    def __init__(self, owner: Any, names: Sequence[str]) -> None:
        self.owner = owner
        self._names = names

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self.owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.owner, name, value)  # the class may be a frozen dataclass

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self.owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def copy(self) -> dict[str, Any]:
        """The attributes as they are."""
        return dict(self)


@dataclass
class Clock:
    """Counts the looks at all holders of a model: while it stands still, what they remember is the same."""

    time: int = 0


class Holder:
    """The attributes of an object, or a list, dictionary or set: as it is, and as it was when last looked at.

    `blocks` are the indices of the blocks that reach it.
    """

    def __init__(self, name: str, container: Any, clock: Clock, *, has_attributes: bool) -> None:
        self.name = name
        self.container = container
        self.clock = clock
        self.has_attributes = has_attributes
        self.is_idle = False
        """whether it is known to keep its values, unless it gets a new one"""
        self.blocks: set[int] = set()
        self.is_outside = False
        """whether the model reaches it outside the blocks, too"""
        self.copy: Any = None
        self.values: Callable[[Any], tuple[Any, ...]] = tuple
        """the values in a container, without what every module has"""
        self.tensors: list[tuple[Tensor, int]] = []
        self._look()

    def changes(self) -> dict[Key, Any]:
        """What has changed since the last look: attributes, or the whole content."""
        old, mutated = self.copy, {id(tensor) for tensor, version in self.tensors if version_of(tensor) != version}
        self._look()
        if not self.has_attributes:
            return {(self.name, CONTENT): self.copy} if mutated or not _same_content(self.copy, old) else {}
        if self.name.endswith(MODULES):
            return {} if _same_content(self.copy, old) else {(self.name, "children"): REPLACED}
        if mutated and self.name.endswith(BUFFERS):
            return {(self.name, key): MUTATED for key, value in self.copy.items() if id(value) in mutated}
        changed = {
            (self.name, key): value
            for key, value in self.copy.items()
            if key not in old or id(value) in mutated or not _same(value, old[key])
        }
        return changed | {(self.name, key): REMOVED for key in old.keys() - self.copy.keys()}

    @property
    def is_unchanged(self) -> bool:
        """Whether `changes` would be empty, if all values are the same objects: much faster than to list them."""
        if len(self.container) != len(self.copy) or self.is_mutated:
            return False
        try:
            values = self.values(self.container)
        except KeyError:  # one attribute has been deleted, and another one added
            return False
        return all(map(is_, values, self.values(self.copy)))

    @property
    def is_mutated(self) -> bool:
        """Whether a tensor in it was changed in place since the last look."""
        return any(version_of(tensor) != version for tensor, version in self.tensors)

    def get(self, key: str) -> Any:
        """The value of an attribute, or a copy of the content."""
        return self.container.get(key, REMOVED) if self.has_attributes else self.container.copy()

    def set(self, key: str, value: Any) -> None:
        """Set an attribute, or the content; the next `changes` don't count it."""
        if not self.has_attributes:
            self._fill(value)
        elif value is REMOVED:
            self.container.pop(key, None)
        else:
            self.container[key] = value
        self._look()

    def undo(self) -> None:
        """Restore what was there at the last look."""
        self._fill(self.copy.copy())

    def _fill(self, content: Any) -> None:
        self.container.clear()
        (self.container.extend if isinstance(self.container, list | deque) else self.container.update)(content)

    def _look(self) -> None:
        self.clock.time += 1
        old, self.copy = self.copy, self.container.copy()
        if isinstance(self.copy, dict) and (old is None or old.keys() != self.copy.keys()):
            keys = self.copy.keys() - INTERNAL if self.has_attributes else self.copy.keys()
            self.values = itemgetter(*keys) if len(keys) > 1 else lambda container: tuple(container[k] for k in keys)
        values = self.copy.values() if isinstance(self.copy, dict) else self.copy
        tensors = [one for one in values if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)]
        self.tensors = [(tensor, version_of(tensor)) for tensor in tensors]


class Scanner:
    """Finds what has changed in some holders. Where nothing has, it takes about 0.1 us per holder."""

    def __init__(self, holders: Sequence[Holder], clock: Clock) -> None:
        self.holders = holders
        self._clock = clock
        self._containers = [holder.container for holder in holders]
        self._active = [holder for holder in holders if not holder.is_idle]
        self._time = -1
        self._remember()

    def scan(self) -> dict[Key, Any]:
        """What has changed since the last scan of these holders."""
        if self._is_unchanged():
            return {}
        changes: dict[Key, Any] = {}
        for holder in [one for one in self.holders if not one.is_unchanged]:
            own = holder.changes()
            if own and holder.is_idle:
                holder.is_idle = False
                self._active.append(holder)
            changes |= own
        return changes

    def undo(self) -> None:
        """Restore everything to what it was at the last scan."""
        if not self._is_unchanged():
            for holder in self.holders:
                holder.undo()

    def _is_unchanged(self) -> bool:
        if self._time != self._clock.time:
            self._remember()
        if list(map(len, self._containers)) != self._lengths:
            return False
        try:
            values = chain.from_iterable([holder.values(holder.container) for holder in self._active])
        except KeyError:
            return False
        return all(map(is_, values, self._values)) and not any(holder.is_mutated for holder in self._with_tensors)

    def _remember(self) -> None:
        """Collect what the holders remember."""
        self._time = self._clock.time
        self._lengths = [len(holder.copy) for holder in self.holders]
        self._values = [value for holder in self._active for value in holder.values(holder.copy)]
        self._with_tensors = [holder for holder in self._active if holder.tensors]


def _same_content(content: Any, other: Any) -> bool:
    if len(content) != len(other) or not all(map(_same, content, other)):
        return False
    return not isinstance(content, dict) or all(map(_same, content.values(), other.values()))


def _same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and type(value) in PLAIN and value == other)

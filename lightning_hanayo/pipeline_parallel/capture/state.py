"""The state of a model's modules, and its changes: attributes, and the lists, dictionaries and objects that they hold.

holder              "model.layers.3.mlp"    {"aux_loss": tensor, "calls": 2, ...}
holder              "model.layers.0.box"    an object that all blocks share is one holder
scan                the changes since the last scan:  {("model.layers.3.mlp", "aux_loss"): tensor}

Values are compared by identity, plain ones by value, and tensors also by their version, which counts changes in place.
A buffer that was changed in place is only marked as changed: its values stay on their rank. Parameters are not state,
wherever they are kept: optimizers change them in place, and each rank has its own. That a module has got another one
is noticed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_, itemgetter
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from lightning_hanayo.versions import version_of, versions_of

Key = tuple[str, str]
"""The name of a holder, and that of an attribute; `CONTENT` for the whole of a list or set."""
CONTENT = ""
REMOVED = object()
"""stands for the value of an attribute that was deleted"""
MUTATED = object()
"""stands for the value of a buffer that was changed in place"""
REPLACED = object()
"""stands for a module or a parameter that was put in the place of another one"""
BUFFERS = "._buffers"
PARAMETERS = "._parameters"
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
    """Counts the looks at all holders of a model. Copies of their values are up to date while it stands still."""

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
        self.blocks: set[int] = set()
        self.is_outside = False
        """whether the model reaches it outside the blocks, too"""
        self.copy: Any = None
        self.values: Callable[[Any], tuple[Any, ...]] = tuple
        """the values in a container, without those that every module has"""
        self.tensors: list[tuple[Tensor, int]] = []
        self._look()

    def changes(self) -> dict[Key, Any]:
        """The changes since the last look: attributes, or the whole content."""
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
        changed |= {(self.name, key): REMOVED for key in old.keys() - self.copy.keys()}
        return dict.fromkeys(changed, REPLACED) if self.name.endswith(PARAMETERS) else changed

    @property
    def is_unchanged(self) -> bool:
        """Whether `changes` would be empty, if all values are the same objects: much faster than to list them."""
        is_mutated = any(version_of(tensor) != version for tensor, version in self.tensors)
        if is_mutated or len(self.container) != len(self.copy):
            return False
        try:
            values = self.values(self.container)
        except KeyError:  # one attribute has been deleted, and another one added
            return False
        return all(map(is_, values, self.values(self.copy)))

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
        """Restore the content of the last look."""
        self._fill(self.copy.copy())

    def _fill(self, content: Any) -> None:
        self.container.clear()
        (self.container.extend if isinstance(self.container, list | deque) else self.container.update)(content)

    def _look(self) -> None:
        self.clock.time += 1
        old, self.copy = self.copy, self.container.copy()
        if isinstance(self.copy, dict) and (old is None or old.keys() != self.copy.keys()):
            keys = [*(self.copy.keys() - INTERNAL if self.has_attributes else self.copy)]
            keys *= 1 + (len(keys) == 1)  # with one key alone, the getter would return the bare value
            self.values = itemgetter(*keys) if keys else tuple
        values = self.copy.values() if isinstance(self.copy, dict) else self.copy
        tensors = [one for one in values if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)]
        self.tensors = [(tensor, version_of(tensor)) for tensor in tensors]


class Scanner:
    """Finds the changes in some holders. Where nothing has, it takes about 0.1 us per holder."""

    def __init__(self, holders: Sequence[Holder], clock: Clock) -> None:
        self.holders = holders
        self._clock = clock
        self._containers = [holder.container for holder in holders]
        self.shared = [holder for holder in holders if holder.is_outside]
        """those that the model reaches outside the blocks, too"""
        self._time = -1
        self._remember()

    def scan(self) -> dict[Key, Any]:
        """The changes since the last scan of these holders."""
        if self._is_unchanged():
            return {}
        changes: dict[Key, Any] = {}
        for holder in [one for one in self.holders if not one.is_unchanged]:
            changes |= holder.changes()
        return changes

    def undo(self) -> None:
        """Restore all values of the last scan."""
        if not self._is_unchanged():
            for holder in [one for one in self.holders if not one.is_unchanged]:  # others may be read-only dictionaries
                holder.undo()

    def _is_unchanged(self) -> bool:
        if self._time != self._clock.time:
            self._remember()
        if list(map(len, self._containers)) != self._lengths:
            return False
        try:
            values = chain.from_iterable([values_in(container) for values_in, container in self._getters])
        except KeyError:
            return False
        if not all(map(is_, values, self._values)):
            return False
        return not self._tensors or versions_of(self._tensors) == self._versions

    def _remember(self) -> None:
        """Copy the holders' values of their last look: one list is compared faster than many."""
        self._time = self._clock.time
        self._lengths = [len(holder.copy) for holder in self.holders]
        self._getters = [(holder.values, holder.container) for holder in self.holders]
        self._values = [value for holder in self.holders for value in holder.values(holder.copy)]
        tensors = [pair for holder in self.holders for pair in holder.tensors]
        self._tensors, self._versions = [tensor for tensor, _ in tensors], [version for _, version in tensors]


def _same_content(content: Any, other: Any) -> bool:
    if len(content) != len(other) or not all(map(_same, content, other)):
        return False
    return not isinstance(content, dict) or all(map(_same, content.values(), other.values()))


def _same(value: Any, other: Any) -> bool:
    return value is other or (type(value) is type(other) and type(value) in PLAIN and value == other)


MAX_LENGTH = 256
"""lists and dictionaries that are longer hold data, not state"""
LIBRARIES = (
    "builtins", "collections", "datasets", "functools", "lightning", "lightning_fabric", "lightning_hanayo", "logging",
    "numpy", "pathlib", "queue", "re", "threading", "tokenizers", "torch", "torchmetrics", "transformers", "types",
    "wandb",
)  # fmt: skip
"""objects of classes in these packages hold nothing that a step sets"""


def share_class_values(module: nn.Module) -> None:
    """Let modules hold, too, the lists and dictionaries of the user's classes: steps add to them through `self`."""
    for part in module.modules():
        users = [kind for kind in reversed(type(part).__mro__) if kind.__module__.partition(".")[0] not in LIBRARIES]
        values = {key: value for kind in users for key, value in vars(kind).items() if not key.startswith("__")}
        vars(part).update({k: v for k, v in values.items() if type(v) in (list, dict) and k not in vars(part)})


class ModuleState:
    """The holders of a whole model. They have the same names on all ranks, which build the model alike.

    Args:
        model: the user's module, with all blocks.
        blocks: the stack's blocks.
        name: of the stack.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], name: str) -> None:
        self.clock = Clock()
        search = _Search({}, self.clock)
        for index, block in enumerate(blocks):
            search.add_block(name, index, block)
        inside = {part for block in blocks for part in block.modules()}
        for path, module in model.named_modules():
            if module not in inside:
                search.add_module(path or type(model).__name__, module, None)
        self.holders = {holder.name: holder for holder in search.found.values()}

    def of_blocks(self, indices: Iterable[int]) -> list[Holder]:
        """The holders that blocks of these indices reach, but for parameters, which blocks don't replace."""
        wanted = set(indices)
        return [one for one in self.holders.values() if one.blocks & wanted and not one.name.endswith(PARAMETERS)]

    def get(self, keys: Iterable[Key]) -> dict[Key, Any]:
        """Attributes and contents of the holders that exist here."""
        return {(name, key): self.holders[name].get(key) for name, key in keys if name in self.holders}

    def set(self, values: Mapping[Key, Any]) -> None:
        """Set attributes and contents of the holders that exist here."""
        for (name, key), value in values.items():
            if name in self.holders:
                self.holders[name].set(key, value)

    def inside(self, keys: Iterable[Key]) -> list[Key]:
        """The contents of lists and dictionaries that these attributes hold."""
        names = {f"{name}.{key}" for name, key in keys if key != CONTENT}
        prefixes = tuple(f"{name}." for name in names)
        return [
            (name, CONTENT)
            for name, holder in (self.holders.items() if names else ())
            if not holder.has_attributes and (name in names or name.startswith(prefixes))
        ]

    def follow(self, changes: Mapping[Key, Any]) -> bool:
        """Find the holders in values that were set, and forget those in replaced ones. Whether there are any."""
        old = set(map(id, self.holders.values()))
        for (name, key), value in changes.items():
            holder = self.holders.get(name)
            if holder is None or type(value) in PLAIN or isinstance(value, Tensor):
                continue
            path, known = f"{name}.{key}", self.holders.values()
            # holders in the replaced value are searched anew; all others keep their copies
            others = {id(h.container): h for h in known if h.name != path and not h.name.startswith(f"{path}.")}
            search = _Search(others, self.clock)
            for block in (*holder.blocks, None) if holder.is_outside else holder.blocks:
                search.add_value(path, value, block)
            self.holders = {one.name: one for one in search.found.values()}
        return old != set(map(id, self.holders.values()))


@contextmanager
def undone(model: nn.Module, blocks: Sequence[nn.Module], name: str) -> Iterator[None]:
    """Inside it the state of a model may change, also in place; then it is as before. Arguments: of `ModuleState`."""
    state = ModuleState(model, blocks, name)
    scanner = Scanner(list(state.holders.values()), state.clock)
    for attributes in [holder.container for holder in scanner.holders if isinstance(holder.container, dict)]:
        tensors = {key: one for key, one in attributes.items() if isinstance(one, Tensor)}
        attributes.update({key: one.clone() for key, one in tensors.items() if not isinstance(one, nn.Parameter)})
    try:
        yield
    finally:
        scanner.undo()


def kept_parameters(blocks: Sequence[nn.Module], name: str) -> Iterator[tuple[nn.Parameter, int, str]]:
    """Yields the parameters that a block reaches but hasn't registered: in a list, a function, a module in a list.

    With the block's index, and where it keeps them. A block that knows a module around it needn't use its parameters.
    """
    for index, block in enumerate(blocks):
        search = _Search({}, Clock())
        search.add_block(name, index, block)
        for path, module in search.modules.items():
            if all(part is not block for part in module.modules()):
                search.parameters |= {one: f"{path}.{own}" for own, one in module.named_parameters()}
        registered = set(block.parameters())
        yield from ((one, index, path) for one, path in search.parameters.items() if one not in registered)


class _Search:
    """Walks through modules and their values."""

    def __init__(self, found: dict[int, Holder], clock: Clock) -> None:
        self._clock = clock
        self.parameters: dict[nn.Parameter, str] = {}
        """in attributes, lists, functions and objects, with the path; modules likewise:"""
        self.modules: dict[str, nn.Module] = {}
        self.found = found
        """by the id of their container"""
        self.reached: set[tuple[int, int | None]] = set()
        """ids of values in functions and tuples, by block"""
        self.slots = {id(h.container.owner): h.container for h in found.values() if isinstance(h.container, Slots)}

    def add_block(self, name: str, index: int, block: nn.Module) -> None:
        """Add a block of the stack with that name."""
        for path, module in block.named_modules():
            self.add_module(f"{name}[{index}]{path and '.'}{path}", module, index)

    def add_module(self, name: str, module: nn.Module, block: int | None) -> None:
        """Add the module's attributes and buffers, but not its children's."""
        if is_metric(module):
            return
        self._add(name, vars(module), block, has_attributes=True)
        if module._buffers:
            self._add(name + BUFFERS, module._buffers, block, has_attributes=True)
        for suffix, parts in ((PARAMETERS, module._parameters), (MODULES, None if block is None else module._modules)):
            if parts:
                made = Holder(name + suffix, parts, self._clock, has_attributes=True)
                holder = self.found.setdefault(id(parts), made)
                holder.is_outside |= block is None
                holder.blocks |= set() if block is None else {block}

    def add_value(self, name: str, value: Any, block: int | None) -> None:
        """Add a value that can hold others."""
        kind = type(value)
        if isinstance(value, nn.Parameter):
            self.parameters.setdefault(value, name)
        if kind in PLAIN or isinstance(value, (Tensor, type)):
            return
        for reached, other in _reached_by(value).items():
            if (id(other), block) not in self.reached:  # a function that calls itself is a circle
                self.reached.add((id(other), block))
                self.add_value(f"{name}.{reached}", other, block)
        if isinstance(value, nn.Module):
            if block is not None:  # a module that a block holds, hidden in a list or an object
                self.modules[name] = value
                self.add_module(name, value, block)
        elif isinstance(value, (dict, list, deque, set)):
            if len(value) <= MAX_LENGTH:
                self._add(name, value, block, has_attributes=False)
        elif kind.__module__.partition(".")[0] not in LIBRARIES:
            if hasattr(value, "__dict__"):
                self._add(name, vars(value), block, has_attributes=True)
            declared = (vars(one).get("__slots__", ()) for one in kind.__mro__)
            names = chain.from_iterable((slots,) if isinstance(slots, str) else slots for slots in declared)
            if slots := tuple(name for name in names if name not in ("__dict__", "__weakref__")):
                self._add(name, self.slots.setdefault(id(value), Slots(value, slots)), block, has_attributes=True)

    def _add(self, name: str, container: Any, block: int | None, *, has_attributes: bool) -> None:
        holder = self.found.get(id(container))
        if holder is not None and (holder.is_outside if block is None else block in holder.blocks):
            return
        if holder is None:
            holder = self.found[id(container)] = Holder(name, container, self._clock, has_attributes=has_attributes)
        if block is None:
            holder.is_outside = True
        else:
            holder.blocks.add(block)
        items = container.items() if isinstance(container, dict | Slots) else enumerate(container)
        for key, value in list(items):
            if key not in INTERNAL:
                self.add_value(f"{name}.{key}", value, block)


def _reached_by(value: Any) -> dict[str, Any]:
    """The values behind a tuple, a function, a bound method, a `partial` or a weak reference, by name."""
    match value:
        case tuple():
            return {str(i): item for i, item in enumerate(value)}
        case FunctionType():
            cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
            return {name: cell.cell_contents for name, cell in cells if cell != CellType()}
        case MethodType():
            return {"__self__": value.__self__, "__func__": value.__func__}
        case partial():
            return {"func": value.func, "args": value.args, "keywords": value.keywords}
        case ref():
            return {"referent": value()}
        case _:
            return {}


def is_metric(module: nn.Module) -> bool:
    """Whether it is a torchmetrics metric: its states are merged over micro-batches as such."""
    return any(kind.__module__.startswith("torchmetrics.") for kind in type(module).__mro__)

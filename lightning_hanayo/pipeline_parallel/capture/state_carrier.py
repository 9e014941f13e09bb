"""Carries attributes that the step or a block sets: to the blocks that read them, and to the step after the stack.

    step of micro-batch 0     self.box.noise = 0.1 |suspended|                     reads block.aux_loss
    blocks, on any rank                                  box.noise is 0.1, set aux_loss

Other micro-batches' steps start while one is suspended, and set the same attributes. So each micro-batch has its own
values: they are set before its code continues, and those of the latest micro-batch are restored after it.

State that only blocks reach stays on their rank, such as a count of their calls. State that other code reaches too,
such as a box that all share, is the step's: each micro-batch brings its values, and other ranks forget them after it.
A block's own parameters, in a list or dictionary that it keeps, travel by name: each rank finds its own.

A step that passes the stack again leaves once more, and others continue meanwhile. Then values that it sets in two
parts are ambiguous for them, and rejected; but for modes, which are set for a while: the others see them as they were
before.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partial_values import PartialParameter, PartialValues
from lightning_hanayo.pipeline_parallel.capture.carriers import BlockRun, Carrier
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import Unavailable, Valueless
from lightning_hanayo.pipeline_parallel.capture.state import (
    BUFFERS,
    CONTENT,
    MODULES,
    MUTATED,
    PARAMETERS,
    PLAIN,
    REMOVED,
    REPLACED,
    Holder,
    Key,
    ModuleState,
    Scanner,
)
from lightning_hanayo.pipeline_parallel.pytree import Flattener

MODES = frozenset({"training", "_disable_adapters"})
"""attributes that the step sets for one pass and then sets back: `eval()`, and `disable_adapter()` of PEFT"""

Tree = dict[Key, tuple[Any, ...]]
"""By key: ("value", tree), ("int" or "float", tensor), ("removed",), ("unavailable", why), ("items", a dictionary).

("mode", value) is of this micro-batch alone: a rank forgets it after it. ("parameters", tree, places) is a value with
parameters of blocks: of each its place among the tree's leaves, which is empty, the block's index and its name there.
"""


class Left(NamedTuple):
    """The state of a suspended step."""

    values: dict[Key, Any] = {}
    """of all keys that steps of this batch have changed before their blocks"""
    changed: frozenset[Key] = frozenset()
    """by this step itself"""
    number: int = 0
    """of this step, counted by their starts, and by the beginnings of further passes"""
    has_passed: bool = False
    """whether this isn't the step's first pass"""
    before: dict[Key, Any] = {}
    """the values that were replaced when the step continued"""


@dataclass(eq=False, repr=False)
class StateCarrier(Carrier):
    """Carries the state of modules, on one rank."""

    state: ModuleState
    """of the whole model"""
    blocks: Sequence[nn.Module]
    """all of the stack"""
    own: Collection[int]
    """the indices of those that this rank runs"""
    _: KW_ONLY
    has_tensors: bool = True
    """whether tensors are carried; not where the ranks of a cube see other samples inside and outside"""

    def __post_init__(self) -> None:
        self._index_of = {id(block): index for index, block in enumerate(self.blocks)}
        self._parameters: dict[nn.Parameter, dict[int, str]] = defaultdict(dict)
        """of the blocks: its name in each block that has it"""
        for index, block in enumerate(self.blocks):
            for name, parameter in block.named_parameters():
                self._parameters[parameter][index] = name
        self._own = frozenset(self.own)
        self._others = frozenset(range(len(self.blocks))) - self._own
        self._local: frozenset[int] | None = None
        """the blocks that the batch's steps run themselves; None: no step runs here"""
        self._early: set[Key] = set()
        """changed by steps of this batch before their blocks: each step has its own values"""
        self._others_changes: set[Key] = set()
        """changed by hooks, and by steps after their blocks: blocks on other ranks must learn them"""
        self._shared: set[Key] = set()
        """changed in state that blocks share with other code: other ranks get the step's values each time"""
        self._num_started = 0
        self._find_scanners()

    def begin_batch(self, num_local: int) -> None:
        """Note the changes by hooks since the last batch. Values that can't be sent, hooks have set on all ranks."""
        self._local = frozenset(range(num_local))
        changes = self._scan()
        self._early.clear()
        self._others_changes |= {
            key for key, value in changes.items() if self._why_not(self._without_parameters(key, value)[0]) is None
        }

    def enter(self) -> None:
        """Called before user code starts or continues: earlier changes are by this rank's blocks, not by user code."""
        self._scanner(self._own).scan()

    def undo(self) -> None:
        """Undo user code's changes since `enter`."""
        self._all.undo()

    def leave(self, earlier: Left | None, *, begins_pass: bool = True) -> tuple[Tree | None, Left]:
        """Return the values that blocks on other ranks may read, and the whole state of the step.

        Raises:
            UnsupportedError: a module has got another parameter, which the next step would find.
        """
        assert self._local is not None
        changes = self._scan()
        for key in [one for one in changes if one[0].endswith(PARAMETERS)]:
            raise UnsupportedError(
                f"{_named(key)} is replaced while the stack is called (functional_call), but steps of other "
                f"micro-batches run in between. Call it outside the stack, or in a block."
            )
        if not (changes or earlier or self._early or self._others_changes or self._shared):
            self._num_started += 1
            return None, Left(number=self._num_started)
        left = earlier or Left()
        if earlier is not None and begins_pass and left.number < self._num_started:
            self._check_order(left._replace(has_passed=True), changes)
        self._early |= changes.keys()
        if begins_pass:
            sent = self._others_changes | self._early | self._shared
            self._others_changes = {key for key in self._others_changes if self._is_mode(key)}
            self._shared |= self._is_shared(sent)
        else:
            sent = set(changes)
        read_by = self._others | self._own - self._local  # the blocks that don't run in the step
        holders = ((key, self._holder(key)) for key in sent)
        readable = sorted(key for key, holder in holders if holder is not None and holder.blocks & read_by)
        tree = {key: self._encode(key, self._value(key, changes), by="the step") for key in readable} or None
        values = _without_mutated({key: self._value(key, changes) for key in self._early})
        values = self.state.get(self.state.inside(changes)) | values
        self._num_started += begins_pass
        number = self._num_started if begins_pass else left.number
        has_passed = left.has_passed or (begins_pass and earlier is not None)
        modes = {key: not value for key, value in changes.items() if self._is_mode(key)}
        modes |= {key: value for key, value in left.before.items() if self._is_mode(key)}
        self._set(modes)
        return tree, Left(left.values | values, left.changed | changes.keys(), number, has_passed)

    def begin_blocks(self, tree: Tree | None, run: BlockRun) -> tuple[Scanner, dict[Key, Any], dict[str, Any]]:
        """Set the values for the blocks. Returns what finds their changes, and values from before."""
        indices = frozenset([self._index_of[id(block)] for block in run.blocks])
        before: dict[Key, Any] = {}
        if tree:
            holders = ((key, self._holder(key)) for key in tree)
            # a key without a holder belongs to an object that another value brings
            read = {key: tree[key] for key, holder in holders if holder is None or holder.blocks & indices}
            before = self._set(self._decode(read))
        scanner = self._scanner(indices)
        scanner.scan()  # changes until now are not by these blocks
        return scanner, before, {holder.name: holder.copy for holder in scanner.shared}

    def end_blocks(
        self, tree: Tree | None, run: BlockRun, begun: tuple[Scanner, dict[Key, Any], dict[str, Any]]
    ) -> Tree | None:
        """Add the blocks' changes."""
        scanner, before, shared = begun
        given, changes = tree or {}, scanner.scan()
        if not changes and not before:
            return tree
        changes = _without_mutated(changes)
        if changes:
            tree = given | {key: self._encode(key, value, by="a block") for key, value in changes.items()}
            self._follow(changes)
        copies = {key: shared[key[0]] for key in changes if key[0] in shared}
        old = {key: copy if key[1] == CONTENT else copy.get(key[1], REMOVED) for key, copy in copies.items()}
        modes = {key for key in before if given[key][0] == "mode"}
        own = before if self._local is not None else {key: before[key] for key in self._is_shared(before) | modes}
        self._set(old | own)
        return tree

    def of_batch(self, trees: Sequence[Tree | None]) -> Sequence[Tree | None]:
        """Each with the plain values that only an earlier one has.

        A block that sets an attribute to the value that it has changes nothing: Swin cuts a window to its images once.
        """
        first, found = trees[0] or {}, []
        known: Tree = {}
        for tree in trees:
            own = tree or {}
            known |= {key: one for key, one in own.items() if one[0] in ("int", "float") or type(one[-1]) in PLAIN}
            keys = dict.fromkeys((*first, *own))  # in one order
            found.append({key: own.get(key) or known[key] for key in keys if key in own or key in known} or None)
        return found

    def deliver(self, tree: Tree | None, left: Left) -> Left:
        """Set the step's own values, and those that blocks have set."""
        if not tree and not left.values:
            return left
        self._shared |= self._is_shared(tree or {})
        return left._replace(before=self._set(left.values | self._decode(tree or {})))

    def end(self, delivered: Left) -> None:
        """Restore the values of the step started last and of this rank's blocks, except those this step has changed."""
        found = self._scan()
        changes = _without_mutated(found)
        self._others_changes |= changes.keys()
        is_latest = delivered.number == self._num_started
        if not is_latest:
            self._check_order(delivered, found)
        restored = {}
        for key in delivered.before.keys() - changes.keys():
            holder = self._holder(key)
            if holder is None or (is_latest and holder.is_outside):
                continue  # the latest step's own values stay
            if holder.blocks & self._own or not (holder.blocks or is_latest):
                restored[key] = delivered.before[key]
        self._set(restored)

    def now(self, tree: Tree | None) -> Tree | None:
        """The values of the same keys."""
        if tree is None:
            return None
        values = {key: self._value(key, {}) for key in tree if self._holder(key) is not None}
        return tree | {key: self._encode(key, value, by="the step") for key, value in values.items()}

    def _find_scanners(self) -> None:
        self._all = Scanner(list(self.state.holders.values()), self.state.clock)
        self._scanners: dict[frozenset[int], Scanner] = {}

    def _follow(self, changes: Mapping[Key, Any]) -> None:
        if self.state.follow(changes):
            self._find_scanners()

    def _scan(self) -> dict[Key, Any]:
        """The changes since the last scan, with buffers that were changed in place."""
        changes = self._all.scan()
        if changes:
            self._follow(changes)
        return changes

    def _scanner(self, indices: frozenset[int]) -> Scanner:
        if indices not in self._scanners:
            self._scanners[indices] = Scanner(self.state.of_blocks(indices), self.state.clock)
        return self._scanners[indices]

    def _set(self, values: dict[Key, Any]) -> dict[Key, Any]:
        """Set attributes, then the contents of their new values; return all old values."""
        if not values:
            return {}
        before = self.state.get(values)
        for is_content in (False, True):
            part = {key: value for key, value in values.items() if (key[1] == CONTENT) is is_content}
            self.state.set(part)
            self._follow(part)
        return before

    def _is_mode(self, key: Key) -> bool:
        """Whether it is a mode that a step of this batch has set."""
        return key[1] in MODES and key in self._early

    def _value(self, key: Key, changes: Mapping[Key, Any]) -> Any:
        holder = self._holder(key)
        return changes[key] if key in changes else REMOVED if holder is None else holder.get(key[1])

    def _holder(self, key: Key) -> Holder | None:
        return self.state.holders.get(key[0])

    def _is_shared(self, keys: Iterable[Key]) -> set[Key]:
        """Those of state that the blocks share with code outside them: it is the step's."""
        holders = ((key, self._holder(key)) for key in keys)
        return {key for key, holder in holders if holder is not None and holder.is_outside and holder.blocks}

    def _without_parameters(self, key: Key, value: Any) -> tuple[Any, tuple[tuple[int, int, str], ...]]:
        """The value with None for each parameter that all blocks have which reach it; its place, a block, its name."""
        holder = self._holder(key)
        leaves, spec = tree_flatten(value)
        places = []
        for place, leaf in enumerate(leaves):
            names = self._parameters.get(leaf, {}) if isinstance(leaf, nn.Parameter) else {}
            if names and holder is not None and names.keys() >= holder.blocks:
                block, name = next(iter(names.items()))
                places.append((place, block, name))
                leaves[place] = None
        return (tree_unflatten(leaves, spec) if places else value), tuple(places)

    def _encode(self, key: Key, value: Any, by: str) -> tuple[Any, ...]:
        """Numbers become tensors: values that differ each time must not change the structure of messages.

        Raises:
            UnsupportedError: the step has set a value that can't be sent.
        """
        if value is REMOVED:
            return ("removed",)
        lost = [item for item in (value if key[1] == CONTENT else [value]) if isinstance(item, Unavailable)]
        if lost:  # a block elsewhere has stored it, in state that blocks share
            return "unavailable", lost[0].why
        if type(value) in (int, float) and self.has_tensors and abs(value) < 2**63:
            return type(value).__name__, torch.tensor(value, dtype=torch.int64 if type(value) is int else torch.float64)
        tree, places = self._without_parameters(key, value)
        why = self._why_not(tree)
        if why is None and places:
            return "parameters", tree, places
        if why is None:
            return "mode" if by == "the step" and self._is_mode(key) else "value", value
        if by != "the step" and key[1] == CONTENT and isinstance(value, dict):
            return "items", {name: self._encode((key[0], str(name)), item, by) for name, item in value.items()}
        what = _named(key)
        if by == "the step":
            model = " or build the model with it (BigBird: attention_type='original_full')" * (value is REPLACED)
            raise UnsupportedError(
                f"{what} was set in the step to {why}, so blocks that run later, or on another rank, would not see it. "
                f"Pass it to the block as an argument, set it in on_train_batch_start on all ranks{model}."
            )
        way_out = "Store tensors or plain values, alone or in a tuple, list or dictionary, or let the block return it."
        return "unavailable", f"{what} was set by {by} to {why}. {way_out}"

    def _why_not(self, value: Any) -> str | None:
        """Why a value can't be sent; None if it can."""
        if value is MUTATED:
            return "other values in place"
        if value is REPLACED:
            return "another module"
        flattener = Flattener()
        try:
            flattener.flatten(value)
        except UnsupportedError:
            return f"a {type(value).__module__}.{type(value).__qualname__}, which can't be sent to other pipeline ranks"
        if isinstance(value, Valueless) or any(tensor.is_meta for tensor in flattener.tensors):
            return "a value that is on another pipeline rank"
        if any(isinstance(tensor, PartialParameter | PartialValues) for tensor in flattener.tensors):
            return "a parameter of which each rank of the cube has a part"
        if flattener.tensors and not self.has_tensors:
            return "a tensor, and in this cube the blocks work on other parts of the samples or features than the step"
        return None

    def _decode(self, tree: Tree) -> dict[Key, Any]:
        return {key: self._decode_value(key, *encoded) for key, encoded in tree.items()}

    def _decode_value(self, key: Key, kind: str, value: Any = None, places: Iterable[tuple[int, int, str]] = ()) -> Any:
        match kind:
            case "int" | "float":
                return value.item()
            case "removed":
                return REMOVED
            case "items":
                return {name: self._decode_value((key[0], str(name)), *item) for name, item in value.items()}
            case "unavailable":
                return [Unavailable(value)] if key[1] == CONTENT else Unavailable(value)
            case "parameters":
                leaves, spec = tree_flatten(value)
                for place, block, name in places:
                    path, _, own = name.rpartition(".")
                    leaves[place] = self.blocks[block].get_submodule(path)._parameters[own]
                return tree_unflatten(leaves, spec)
            case _:
                return value

    def _check_order(self, early: Left, late: Mapping[Key, Any]) -> None:
        """Reject values counted or collected before and after the blocks: other micro-batches' steps run in between.

        Other values are replaced, not continued, so that each micro-batch's own is right. But with several passes the
        others would see values that are set for one of them, and statistics would be taken in another order.
        """
        rejected = (int, float, bool, str, type(MUTATED)) if early.has_passed else (int, float)
        for key in early.changed & late.keys():
            if (type(late[key]) in rejected and key[1] not in MODES) or key[1] == CONTENT:
                raise UnsupportedError(
                    f"{_named(key)} is changed in the step before the blocks are called and again after it; other "
                    f"micro-batches' steps run in between. Change it once, or in on_train_batch_start."
                )


def _named(key: Key) -> str:
    return ".".join(
        part.removesuffix(BUFFERS).removesuffix(PARAMETERS).removesuffix(MODULES) for part in key if part != CONTENT
    )


def _without_mutated(changes: Mapping[Key, Any]) -> dict[Key, Any]:
    return {key: value for key, value in changes.items() if value is not MUTATED and value is not REPLACED}

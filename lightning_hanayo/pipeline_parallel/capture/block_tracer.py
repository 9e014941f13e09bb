"""The block tracer: follows one step's calls of the blocks, and suspends the step where other ranks must compute.

    user code    block 0   block 1   block 2   block 3                       stage 0 = {0, 1}
    tracer       runs it   runs it   records,  records, suspends the step with
                                     proxy     the stage input, returns the stack's output

The blocks of stage 0 run where they are called, in the step's thread. The calls of the others are recorded, until the
last one suspends the step, and so are functions of torch that the step calls with their outputs (`between`). Where no
block may run in that thread (`num_local` is 0), the first call suspends the step too, until it is resumed with that
block's output.

After its last block the step may call the first one again: a further pass, with or without gradients, like the first.
"""

import sys
import weakref
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves, tree_map

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel import pytree
from lightning_hanayo.pipeline_parallel.capture import code_between_blocks
from lightning_hanayo.pipeline_parallel.capture.carriers import NO_CARRIERS, Carriers
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import (
    SKIPPED_BLOCKS,
    Proxy,
    StandIns,
    Unavailable,
    Value,
    proxies_like,
    subtree,
    user_line,
)
from lightning_hanayo.pipeline_parallel.capture.forward_patch import patch_of, run_block, run_original
from lightning_hanayo.pipeline_parallel.capture.stage_input import NO_OUTPUT, StageInput
from lightning_hanayo.pipeline_parallel.capture.threads import autocast_state, suspend
from lightning_hanayo.pipeline_parallel.graph_boundary import as_now, current_sequence_number, edges_of
from lightning_hanayo.pipeline_parallel.p2p import Message
from lightning_hanayo.pipeline_parallel.rng import RandomStreams
from lightning_hanayo.versions import versions_of

MOST_CALLS = 1 << 24
"""of blocks and functions in one pass"""


@dataclass(eq=False, repr=False)
class TracedStack:
    """The stack as the steps of one rank call it.

    The first `num_local` of all `blocks` run where they are called: those of stage 0, or none. Errors call the stack by
    its qualified `name`.
    """

    blocks: Sequence[nn.Module]
    num_local: int
    name: str
    _: KW_ONLY
    sends_objects: bool = True
    """whether blocks work on the same samples and features as the step, so that they may get any objects"""
    stand_ins: StandIns = field(default_factory=StandIns)
    """tell what isn't here, for code between two blocks"""

    def __post_init__(self) -> None:
        self.num_blocks = len(self.blocks)
        self.index_of = {id(block): i for i, block in enumerate(self.blocks)}
        self.has_one_class = len(set(map(type, self.blocks))) == 1
        self.first_numbers = count(0, MOST_CALLS)
        """of the outputs of each pass, so that a proxy from another step or pass is known as such"""


class BlockTracer:
    """Follows one step through the stack: runs the first blocks, records the calls of the others, suspends at the last.

    One pass after another; its attributes are those of the latest one.

    `carriers` carry values that the step and the blocks store for each other. The step begins in `grad_mode`.
    """

    def __init__(self, stack: TracedStack, carriers: Carriers = NO_CARRIERS, *, grad_mode: bool = True) -> None:
        self._stack = stack
        self._grad_mode = grad_mode
        self.pass_number = -1
        self.line = ""
        """the user's line that calls the stack, in passes other than a usual step's"""
        self.sequence_number = 0
        """autograd's sequence number at the last suspension: older nodes in the loss's graph belong to earlier code"""
        self.delivered: tuple[Any, ...] = ()
        """of the carriers, which gave the step its values"""
        self.sent: list[GradientEdge] = []
        """where the gradients of the tensors enter that the stack has got from the step"""
        self.received: list[Any] = []
        """trees that the step has got from the stack"""
        self.kept: dict[tuple[int, tuple[Any, ...]], Any] = {}
        """by number and path: outputs in the middle of the stack, once they are here"""
        self.carriers = carriers
        self._trees: tuple[Any, ...] = ()
        self._caches: dict[int, CacheArgument] = {}
        self._begin_pass()

    def _begin_pass(self) -> None:
        self.num_called = 0
        self.pass_number += 1
        self._first_number = next(self._stack.first_numbers)
        self._nested: list[Tensor] = []
        self.has_gradients = self._grad_mode
        self._output: Any = None
        self._structures: dict[type[nn.Module], Any] = {}
        self._returned = pytree.ANYWHERE
        self._autocast = autocast_state()
        self._position = 0
        self._of_last_block = -1
        self._described: dict[int, tuple[nn.Module, pytree.Skeleton, list[Tensor]]] = {}
        self._values: dict[int, Any] = {}
        self._proxies: list[weakref.ref[Proxy]] = []
        self._numbered: list[Any] = []
        self._forget_calls()
        self._has_left = False

    def _forget_calls(self) -> None:
        # what a first block that is called alone puts into a dictionary, the step learns too late for later calls
        shares = self._stack.sends_objects and (self._stack.num_local > 0 or self.num_called > 0)
        self._flattener = pytree.Flattener(self._numbered if shares else None)
        self._calls: dict[pytree.Skeleton, int] = {}
        self._call_of_block: list[int] = []
        self._versions: list[int] = []

    @property
    def is_between_passes(self) -> bool:
        """Whether the step has called no block yet, or the whole stack."""
        return self.num_called in (0, self._stack.num_blocks)

    @property
    def next_block(self) -> str:
        """The name of the block that the step has to call next."""
        return f"{self._stack.name}[{self.num_called % self._stack.num_blocks}]"

    def take_message(self) -> Message:
        """The recorded calls, the output of the blocks before them, and the carried trees.

        Called once during each suspension: the tensors are kept here no longer, so that they go when they are sent.
        """
        if self._versions != versions_of(self._flattener.tensors[: len(self._versions)]):
            raise UnsupportedError(
                f"the step changes a tensor in place that it has passed to a block of {self._stack.name} before, or "
                f"has used between two blocks, which run later, on other ranks. Change a copy of it."
            )
        recorded = tuple(self._call_of_block)
        output = NO_OUTPUT if recorded else self._flattener.flatten(self._output, "the output of a block")
        carried = self._flattener.flatten(self._trees, "what the step stores")
        calls, tensors = tuple(self._calls), tuple(self._flattener.tensors)
        message = StageInput(output, calls, recorded, (), self._returned, carried, tensors).message
        self.sent += edges_of(message.differentiable)
        self._forget_calls()
        self._output, self._trees = None, ()
        return message

    def on_call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle a block's call by user code; return its output, a proxy, or the output of the stack.

        Raises:
            UnsupportedError: blocks out of order or in another grad mode than those before, or an argument that can't
                be sent.
        """
        index = self._stack.index_of.get(id(block))
        if index is None:  # a copy of the model (an average, say) that user code calls in its step
            return run_block(block, *args, **kwargs)
        self._check_call(index)
        self.num_called += 1
        position = self._of_last_block = self._position
        self._position += 1
        for value in (*args, *kwargs.values()):
            if pytree.is_cache_class(type(value)):  # type: ignore[arg-type]
                self._caches.setdefault(id(value), CacheArgument(value, self.pass_number)).check(self.pass_number)
        patch = patch_of(block)
        if index < self._stack.num_local:
            with patch.stream_of_call():
                output = run_original(block, *args, **kwargs)
            self._note_output(block, output)
        else:
            patch.streams.pass_block()
            self._record_block(block, index, args, kwargs)
            if index == 0:
                self._note_output(block, self._suspend(patch.streams))
            if self.num_called < self._stack.num_blocks:
                output = self._output_of(block, position)
        if self.num_called < self._stack.num_blocks:
            return output
        kept = self._keep(position)
        self._described.clear()
        self._values.clear()
        self.sequence_number = current_sequence_number()
        made = self._suspend(patch.streams)
        if not kept:
            return made
        made, *values = made
        self.kept.update(zip(kept, values, strict=True))
        return made

    def _check_call(self, index: int) -> None:
        if index == 0 and self.is_between_passes:
            self._enter_pass()
        if index != self.num_called:
            raise UnsupportedError(
                f"{self._stack.name}[{index}] is called where {self.next_block} is next; a pipeline runs all blocks of "
                f"the stack, in order. {SKIPPED_BLOCKS}"
            )
        if torch.is_grad_enabled() != self.has_gradients:
            now, before = ("off", "on") if self.has_gradients else ("on", "off")
            raise UnsupportedError(
                f"{self._stack.name}[{index}] is called with grad mode {now}, and the blocks before it with grad mode "
                f"{before}. Call all in one; to freeze some blocks, call requires_grad_(False) on them."
            )

    def _record_block(self, block: nn.Module, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if index == self._stack.num_local:
            for carrier in self.carriers:
                carrier.begin_recording(self._numbered)
        name = f"{self._stack.name}[{index}]"
        call = (
            "tuple",
            ("tuple", *[self._argument(index, arg, f"argument {i} of {name}") for i, arg in enumerate(args)]),
            ("dict", *[(("plain", "str", key), self._argument(index, arg, f"argument {key!r} of {name}"))
                       for key, arg in kwargs.items()]),
        )  # fmt: skip
        self._record(call)
        self._described[self._of_last_block] = block, call, self._flattener.tensors

    def _keep(self, position: int) -> list[tuple[int, tuple[Any, ...]]]:
        """Ask for the values of all outputs that the step still has, if it computes with them. Returns these."""
        if not any(len(call) > 3 for call in self._calls):
            return []
        alive = [found for one in self._proxies if (found := one()) is not None]
        kept = list(dict.fromkeys((one.block, one.path) for one in alive))
        values = (Proxy((), self._first_number + position), *(Proxy(path, block) for block, path in kept))
        call = self._flattener.flatten((values, {}, code_between_blocks.KEPT, None))
        self._record(pytree.map_leaves(call, partial(self._relative, position + 1, "")))
        return kept

    def _record(self, call: pytree.Skeleton) -> None:
        self._call_of_block.append(self._calls.setdefault(call, len(self._calls)))
        self._versions += versions_of(self._flattener.tensors[len(self._versions) :])

    def _note_output(self, block: nn.Module, output: Any) -> None:
        """Note what a block returns that is here."""
        self._output = output
        self._note_structure(block, output)
        if self._stack.has_one_class:
            self._returned = pytree.value_paths(output)

    def _note_structure(self, block: nn.Module, output: Any) -> None:
        """Note how outputs of the block's class look; not where they have plain values, which may differ."""
        kinds: set[type] = set()  # also of what is in subclasses of containers, which torch takes for leaves
        pytree.map_tree(output, lambda leaf, _: kinds.add(type(leaf)))
        has_plain = not kinds.isdisjoint(pytree.PLAIN[1:])
        self._structures[type(block)] = None if has_plain else _without_tensors(output)

    def _output_of(self, block: nn.Module, position: int) -> Any:
        """Proxies for the output of a block: as of one of its class that is here, else as it is without values."""
        structure = self._structures.get(type(block))
        if structure is None:
            try:
                structure = self._values_at(position)
                self._note_structure(block, structure)
            except UnsupportedError:
                structure = proxies_like(self._output, 0)
        return self._proxies_for(structure, position)

    def _proxies_for(self, structure: Any, position: int) -> Any:
        """Proxies for what the call at `position` makes, but for plain values."""
        number = self._first_number + position
        plain = pytree.PLAIN
        made = pytree.map_tree(structure, lambda leaf, path: leaf if type(leaf) in plain else Proxy(path, number))
        leaves = (made,) if type(made) is Proxy else tree_leaves(made)
        self._proxies += [weakref.ref(one) for one in leaves if type(one) is Proxy]
        return made

    def _values_at(self, position: int) -> Any:
        """What is known of an output on another rank: a tree with a `Value` for each tensor."""
        if position not in self._values:
            block, call, tensors = self._described[position]
            made, given = self._stack.stand_ins.run(block, call, tensors, partial(self._value, position))
            self._values[position] = made.values(given, position)
        return self._values[position]

    def _value(self, position: int, path: tuple[Any, ...], distance: int) -> Value:
        """What is known of an output in a call."""
        found: Value = subtree(self._values_at(position - 1 - distance), path)
        return found

    def on_function(self, proxy: Any, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Record a function of torch that the step calls with a proxy between two blocks.

        Returns what it makes: proxies for tensors; or its answer about shapes and the like, which isn't recorded.

        Raises:
            UnsupportedError: it needs values, or acts on something else than its result.
        """
        if self.is_between_passes:
            return function(*tree_map(self._from_kept, args), **tree_map(self._from_kept, kwargs))
        name, grad = code_between_blocks.name_of(function), torch.is_grad_enabled()
        shown = getattr(function, "__name__", str(function)) if name is None else name.removeprefix("torch.")
        if name is None or not self._stack.sends_objects:
            return proxy.refuse(shown)
        position, autocast = self._position, autocast_state()
        modes = None if (grad, autocast) == (self.has_gradients, self._autocast) else (grad, autocast)
        tensors = self._flattener.tensors
        call = asked = self._function_call(position, (tuple(args), kwargs, name, modes))
        if name in ("torch.Tensor.__getitem__", "torch.Tensor.__setitem__"):
            asked = self._function_call(position, (code_between_blocks.with_indices(args), kwargs, name, modes))
        try:
            made, given = self._stack.stand_ins.run(None, asked, tensors, partial(self._value, position))
        except code_between_blocks.NEEDS_VALUES:
            proxy.refuse(shown)
        changed = [(given[i], spec) for i, spec in made.changed]
        for value, spec in changed:
            self._check_change(value, proxy, shown)
            value.spec = spec
        if not made.has_tensors and not changed:
            return made.tree
        self._record(call)
        self._position += 1
        self._values[position] = made.values(given, position)
        return self._proxies_for(self._values[position], position)

    def _from_kept(self, leaf: Any) -> Any:
        if type(leaf) is not Proxy:
            return leaf
        if (leaf.block, leaf.path) not in self.kept:
            leaf.refuse("after the stack")
        return self.kept[leaf.block, leaf.path]

    def _function_call(self, position: int, call: tuple[Any, dict[str, Any], str, Any]) -> pytree.Skeleton:
        what = f"an argument of {call[2]}"
        skeleton = self._flattener.flatten(call, what, is_argument=True)
        return pytree.map_leaves(skeleton, partial(self._relative, position, what))

    def _check_change(self, value: Value, proxy: Any, shown: str) -> None:
        """Check that others see a change in place.

        Raises:
            UnsupportedError: it is of a tensor that the step has, or of which there may be a view on another rank.
        """
        if value.storage is code_between_blocks.OF_STEP:
            proxy.refuse(f"{shown}, which changes a tensor of the step in place")
        for position in range(self._position):
            if position not in self._described and position not in self._values:
                continue  # it is here
            for other in tree_leaves(self._values_at(position)):
                is_view = isinstance(other, Value) and other is not value and other.storage is value.storage
                if is_view and min(other.position, value.position) <= self._of_last_block:
                    proxy.refuse(f"{shown}, which changes something in place that other values are views of")

    def _suspend(self, streams: RandomStreams) -> Any:
        """Suspend the step; return the output with which the main thread resumes it. Carried trees come with it."""
        begins_pass, self._has_left = not self._has_left, True
        pairs = zip(self.carriers, self.delivered or (None,) * len(self.carriers), strict=True)
        left = [carrier.leave(earlier, begins_pass=begins_pass) for carrier, earlier in pairs]
        self._trees = tuple([tree for tree, _ in left])
        self._nested += self._flattener.nested
        with streams.kept():
            output, trees = suspend()
        rows = zip(self.carriers, trees, left, strict=True)
        self.delivered = tuple([carrier.deliver(tree, own) for carrier, tree, (_, own) in rows])
        return pytree.with_ragged_dims_of(self._nested, output) if self._nested else output

    def _argument(self, index: int, value: Any, what: str) -> pytree.Skeleton:
        if id(value) in self._caches:
            value = self._caches[id(value)].sent_to(self._stack.blocks[index])
        skeleton = self._flattener.flatten(value, what, is_argument=True)
        position = self._position - 1
        if not self._stack.sends_objects and any(
            n[0] == "object" and n[1] != "UserDict" for n in pytree.nodes(skeleton)
        ):
            raise UnsupportedError(
                f"{what} is or holds a {type(value).__name__}, and in this cube blocks work on other parts of the "
                f"samples or features than the step. Pass tensors, or set cube=1, or cube_outside='share' if it can."
            )
        if skeleton[0] != "proxy" and not pytree.has_proxies(skeleton):
            return skeleton
        return pytree.map_leaves(skeleton, partial(self._relative, position, what))

    def _relative(self, position: int, what: str, leaf: pytree.Skeleton) -> pytree.Skeleton:
        """Give a proxy in the call at `position` the number of calls between the two: 0 for the output before it.

        Raises:
            UnsupportedError: the proxy stands for an output in another pass or step.
        """
        if leaf[0] != "proxy":
            return leaf
        distance = self._first_number + position - 1 - leaf[1]
        if not 0 <= distance < position:
            raise UnsupportedError(
                f"{what} is the output of a block in another pass or step, which is on another rank. Let the block "
                f"store the value as an attribute (self.value = x.detach())."
            )
        return ("proxy", distance, leaf[2])

    def _enter_pass(self) -> None:
        """Begin the first pass, or another one."""
        if self.num_called:
            self._begin_pass()
        self.has_gradients = torch.is_grad_enabled()
        if self._grad_mode and not self.has_gradients:
            frame: FrameType | None = sys._getframe()
            while frame is not None and not isinstance(own := _first_argument(frame), FunctionCtx):
                frame = frame.f_back
            if frame is not None:
                kind = type(own).__name__.removesuffix("Backward")
                raise UnsupportedError(
                    f"{user_line()} calls {self._stack.name}[0] in the forward of an autograd.Function ({kind}), whose "
                    f"backward may call it again, alone. Use checkpoint(use_reentrant=False), or call it in a block."
                )
        if self.pass_number or self.has_gradients != self._grad_mode:
            self.line = user_line()


def _first_argument(frame: FrameType) -> Any:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def _without_tensors(output: Any) -> Any:
    return pytree.map_tree(output, lambda leaf, _: Proxy() if isinstance(leaf, Tensor) else leaf)


FILLED = (
    "which a block on another rank has filled. A cache lives inside one forward: pass use_cache=False, also to "
    "generate, or a new cache to each call."
)
"""how errors about the use of a cache after the stack end"""


class CacheArgument:
    """A key/value cache of transformers among the arguments of blocks, in one pass.

        cache before the stack         [k0, v0] [k1, v1] [k2, v2] [k3, v3]     made by a prefix encoder
        blocks on other ranks get      [k0, v0] [k1, v1] [k2, v2] [k3, v3]     None, if all are empty
        cache after the stack          filled   filled   x        x            x: reading it is an error

    Blocks fill layers where they run, and these stay there: a cache lives inside one forward.
    """

    def __init__(self, cache: Any, pass_number: int) -> None:
        self._cache = cache
        self._before = as_now(cache)
        self._pass_number = pass_number
        self._is_empty = not _holds_values(self._before)

    def check(self, pass_number: int) -> None:
        """Check that it is in the pass that first used it.

        Raises:
            UnsupportedError: in another one, a block would need what blocks on other ranks have filled.
        """
        if pass_number != self._pass_number:
            raise UnsupportedError(f"{user_line()} uses a key/value cache again, {FILLED}")

    def sent_to(self, block: nn.Module) -> Any:
        """The cache for a block on another rank. From then on the step can't use the layers that this block fills.

        Those are the layers whose numbers its modules know; if they know none, all that no block has filled here.

        Raises:
            UnsupportedError: the block reads from the cache what other blocks put there besides its layers.
        """
        if block not in _layers_of:
            numbers = (getattr(part, "layer_idx", None) for part in block.modules())
            _layers_of[block] = frozenset(number for number in numbers if isinstance(number, int))
        _close(self._cache, self._before, _layers_of[block])
        by_argument = hasattr(sys.modules["transformers.cache_utils"], "KVSharingDict")
        if not by_argument and any(getattr(part, "is_kv_shared_layer", False) for part in block.modules()):
            raise UnsupportedError(
                f"{type(block).__name__} takes keys and values of other blocks from the cache, which stays on their "
                f"ranks. Use a newer transformers, which passes them as an argument (cache_utils.KVSharingDict)."
            )
        return None if self._is_empty else self._before


_layers_of: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
"""the numbers of a cache's layers that a block's modules know as their own"""


def _filled(index: int) -> Unavailable:
    return Unavailable(f"layer {index} of a key/value cache, {FILLED}")


def _close(cache: Any, before: Any, own: frozenset[int]) -> None:
    for name, value in vars(cache).items():
        if name == "layers":
            for index, layer in enumerate(vars(before)[name]):
                is_filled = isinstance(value[index], Unavailable) or any(
                    now is not vars(layer).get(key) for key, now in vars(value[index]).items()
                )
                if not is_filled and (not own or index in own):
                    value[index] = _filled(index)
            if not isinstance(value[-1] if value else None, Unavailable):
                value.append(_filled(len(value)))
        elif hasattr(value, "layers"):
            _close(value, vars(before)[name], own)


def _holds_values(value: Any) -> bool:
    match value:
        case Tensor():
            return value.numel() > 0
        case list() | tuple():
            return any(map(_holds_values, value))
        case dict():  # names with an underscore: sizes of windows, not content
            return any(_holds_values(one) for name, one in value.items() if not str(name).startswith("_"))
        case _:
            return hasattr(value, "__dict__") and not isinstance(value, type) and _holds_values(vars(value))

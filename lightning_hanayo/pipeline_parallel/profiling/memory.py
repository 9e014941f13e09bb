"""Counts the bytes of this process's live tensors by purpose, and the most at one time.

    operation returns a tensor    + bytes of its memory, as the current kind: "activations", "messages", ...
    memory is freed               - the same bytes
    claim(tensors, kind)          these tensors count as that kind from now on

Memory that several tensors share counts once. Memory that an operation needs inside itself, or that other libraries
allocate, is not seen. Of each action of a batch the change and the peak are measured:

    held before the F of a stage  --->  most held during it  --->  held after it
          |<------------------ most ---------->|                        |
          |<------------------ change ---------------------------------->|

Tensors that a backward makes count as workspace until it ends. Then each is a gradient, is sent on, or waits in the
queue of weight gradients.
"""

import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from typing_extensions import override

from lightning_hanayo.pipeline_parallel.message import Message
from lightning_hanayo.schedule import Action, Kind

MemoryKind = Literal[
    "weights", "gradients", "optimizer", "gathered", "activations", "suspended", "queue", "messages", "workspace",
    "other",
]  # fmt: skip
"""The purposes of tensors; `MemoryReport` explains the kinds."""
MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(frozen=True)
class Peak:
    """The most bytes that were live at one time."""

    num_bytes: int
    by_kind: Mapping[MemoryKind, int]


@dataclass
class _Memory:
    """The memory of one or more tensors."""

    kind: MemoryKind
    num_bytes: int
    reference: "weakref.ref[Any] | None" = None


class LiveBytes:
    """Counts in the threads that are inside `counting`.

    Args:
        device: the type of the device whose memory counts, such as "cuda"; also "meta".
        resized: whether memory may be resized outside operations, as FSDP2 frees parameters; that is looked at before
            a peak is taken for one.

    Example:
        >>> live = LiveBytes()
        >>> with live.counting():
        ...     x = torch.zeros(1000)
        >>> live.num_bytes
        4000
    """

    def __init__(self, device: str = "cpu", *, resized: bool = False) -> None:
        self.kind: MemoryKind = "other"
        """of tensors that are made from now on"""
        self._device = device
        self._resized = resized
        self._held: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
        self.peak = Peak(0, dict(self._held))
        """since `restart`"""
        self._memories: dict[int, _Memory] = {}
        self._freed: deque[tuple[int, _Memory]] = deque()
        """noted in whichever thread frees; taken off in a thread that counts"""
        self._threads: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """All that is live now."""
        return sum(self.held.values())

    @property
    def held(self) -> Mapping[MemoryKind, int]:
        """The bytes of each kind that are live now."""
        while self._freed:
            key, memory = self._freed.popleft()
            self._held[memory.kind] -= memory.num_bytes
            if self._memories.get(key) is memory:
                del self._memories[key]
        return MappingProxyType(self._held)

    def restart(self) -> Peak:
        """Begin a new peak, and return the one before; live tensors stay counted."""
        before, self.peak = self.peak, Peak(self.num_bytes, dict(self._held))
        return before

    def go_on(self, before: Peak) -> None:
        """Let the peak be that of the time before `restart`, too."""
        if before.num_bytes > self.peak.num_bytes:
            self.peak = before

    def claim(self, tensors: Iterable[Tensor], kind: MemoryKind) -> None:
        """Count the memory of these tensors as `kind` from now on."""
        for tensor in tensors:
            memory = self._find(tensor)
            if memory is not None:
                self._held[memory.kind] -= memory.num_bytes
                memory.kind = kind
                self._held[kind] += memory.num_bytes

    def claim_all(self, of: MemoryKind, kind: MemoryKind) -> None:
        """Count everything of one kind as another."""
        _ = self.held
        for memory in self._memories.values():
            if memory.kind == of:
                memory.kind = kind
        self._held[kind] += self._held[of]
        self._held[of] = 0

    @contextmanager
    def making(self, kind: MemoryKind) -> Iterator[None]:
        """Inside it, what is made counts as `kind`."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside it, the calling thread's operations are counted, and its backwards."""
        thread = threading.get_ident()
        if thread in self._threads:
            yield
            return
        self._threads.add(thread)
        try:
            with _Counting(self):
                yield
        finally:
            self._threads.discard(thread)

    def note(self, tensors: Iterable[Any]) -> None:
        """Count the memory of those among `tensors` that isn't counted yet."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._find(tensor)
        if self.num_bytes > self.peak.num_bytes and self._resized:
            for memory in self._memories.values():
                storage = None if memory.reference is None else memory.reference()
                if storage is not None:
                    self._held[memory.kind] += storage.nbytes() - memory.num_bytes
                    memory.num_bytes = storage.nbytes()
        if (total := self.num_bytes) > self.peak.num_bytes:
            self.peak = Peak(total, dict(self._held))

    def _find(self, tensor: Tensor) -> _Memory | None:
        """The memory of a tensor, counted from now on if it is new. None: it isn't counted."""
        if tensor.layout is not torch.strided or tensor.device.type != self._device:
            return None
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        memory = self._memories.get(key)
        if memory is None or memory.reference is None or memory.reference() is not storage:
            memory = self._memories[key] = _Memory(self.kind, 0)
            freed = (key, memory)
            memory.reference = weakref.ref(storage, lambda _: self._freed.append(freed))
        self._held[memory.kind] += num_bytes - memory.num_bytes  # memory may be resized
        memory.num_bytes = num_bytes
        return memory


class _Counting(TorchDispatchMode):
    """Notes the results of one thread's operations."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(one, "__tensor_flatten__") for one in types):
            return NotImplemented  # the tensors inside are counted, such as a DTensor's own part
        result = function(*args, **(kwargs or {}))
        self._live.note(tree_iter(result))
        return result


_NOT_MEASURED = nullcontext()


class MemoryWatch:
    """Events of a rank's memory, from the engine and the code around it. This class ignores them."""

    is_measuring = False
    """whether actions are measured, and so run one at a time"""

    def action(self, action: Action) -> AbstractContextManager[None]:
        """Entered for each action."""
        return _NOT_MEASURED

    def transfers(self) -> AbstractContextManager[None]:
        """Entered while sends and receives start."""
        return _NOT_MEASURED

    def user_code(self) -> AbstractContextManager[None]:
        """Entered by each step of the user's, in its thread."""
        return _NOT_MEASURED

    def note_input(self, message: Message) -> None:
        """Called with the message that an action uses."""

    def note_output(self, message: Message) -> None:
        """Called with the message that an action has made."""

    def note_gathered(self) -> None:
        """Called when parameters have become whole for a batch."""

    def note_kept(self, stage: int, tensors: Sequence[Tensor]) -> None:
        """Called after an action with the tensors that its stage keeps for later micro-batches."""


@dataclass(frozen=True)
class ActionBytes:
    """The change of a rank's bytes by one action."""

    change: Mapping[MemoryKind, int]
    """by kind, from before it to after it"""
    most: int
    """the most during it, beyond the bytes before it"""
    output: int = 0
    """of the message that it makes for another stage"""


@dataclass(frozen=True)
class BatchBytes:
    """The measured bytes of one batch on one rank."""

    actions: Mapping[Action, ActionBytes]
    begin: Mapping[MemoryKind, int]
    """held before its first action"""
    end: Mapping[MemoryKind, int]
    """held after its last action"""
    peak: Peak
    """from its begin to the end of the optimizer's step"""
    repeats: bool = False
    """whether actions ran several times, in several passes through the stack; then the last ones are in `actions`"""
    kept: int = 0
    """the most that stages have kept for later micro-batches"""
    step: int = 0
    """the most during the optimizer's step, beyond the bytes before it"""


@dataclass(eq=False)
class MemoryTrace(MemoryWatch):
    """Measures the batches of one rank, and keeps the one that held the most."""

    is_measuring = True
    blocks: Sequence[nn.Module]
    """of the stack: tensors that they make in a forward are activations"""
    parameters: Sequence[nn.Parameter]
    """that this rank trains: their `.grad` are gradients"""
    is_whole: Callable[[Tensor], bool] = lambda _: False
    """whether a cube holds the parameter whole, while a batch runs"""
    live: LiveBytes = field(default_factory=LiveBytes)
    largest: BatchBytes | None = field(default=None, init=False)
    """None: no batch was measured"""
    _actions: dict[Action, ActionBytes] = field(default_factory=dict, init=False)
    _begin: Mapping[MemoryKind, int] = field(default_factory=dict, init=False)
    _end: Mapping[MemoryKind, int] = field(default_factory=dict, init=False)
    _repeats: bool = field(default=False, init=False)
    _output: int = field(default=0, init=False)
    """bytes of the message that the current action has made"""
    _batch: BatchBytes | None = field(default=None, init=False)
    """the last one, before its optimizer step"""
    _after_batch: int = field(default=0, init=False)
    _kept: dict[int, int] = field(default_factory=dict, init=False)
    """by stage: bytes that it keeps for later micro-batches"""
    _most_kept: int = field(default=0, init=False)
    _around_blocks: defaultdict[int, list[MemoryKind]] = field(default_factory=lambda: defaultdict(list), init=False)
    """by thread: the kind of new memory where a block was called"""

    def __post_init__(self) -> None:
        self._ids = {id(block) for block in self.blocks}

    @contextmanager
    def batch(self, weights: Iterable[Tensor], optimizer: Iterable[Tensor]) -> Iterator[None]:
        """Inside it the rank runs a batch; these are its weights, and the optimizer's tensors."""
        live = self.live
        self._actions, self._batch, self._repeats = {}, None, False
        self._around_blocks.clear()
        self._kept.clear()
        self._most_kept = 0
        live.claim_all("workspace", "other")
        live.claim(weights, "weights")
        live.claim(optimizer, "optimizer")
        self._claim_gradients()
        live.restart()
        hooks = (
            torch_module.register_module_forward_pre_hook(self._before_block),
            torch_module.register_module_forward_hook(self._after_block, always_call=True),
        )
        try:
            with live.counting(), live.making("other"):
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self._batch = BatchBytes(self._actions, self._begin, self._end, live.restart(), self._repeats, self._most_kept)
        self._after_batch = live.num_bytes

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Inside it the optimizer steps, and before that it may run the batch."""
        with self.live.counting(), self.live.making("workspace"):
            yield
        if self._batch is not None:
            step, peak = self.live.peak, self._batch.peak
            peak = step if step.num_bytes > peak.num_bytes else peak
            self._batch = replace(self._batch, peak=peak, step=max(0, step.num_bytes - self._after_batch))

    def keep(self) -> bool:
        """Called between two batches, unless the one before was unlike others. Returns whether it is the largest."""
        batch, largest = self._batch, self.largest
        if batch is None or (largest is not None and batch.peak.num_bytes <= largest.peak.num_bytes):
            return False
        self.largest = batch
        return True

    @override
    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        live, is_forward = self.live, action.kind is Kind.F
        self._output, live.kind = 0, "activations" if is_forward else "workspace"
        before, peak = dict(live.held), live.restart()
        self._begin = self._begin if self._actions else before
        self._repeats |= action in self._actions
        yield
        self._claim_gradients()
        live.claim_all("workspace", "queue" if action.kind is Kind.I else "gradients")
        self._end = dict(live.held)
        change = {kind: held - before[kind] for kind, held in self._end.items()}
        self._actions[action] = ActionBytes(change, live.peak.num_bytes - sum(before.values()), self._output)
        live.go_on(peak)

    @override
    def transfers(self) -> AbstractContextManager[None]:
        return self.live.making("messages")

    @override
    @contextmanager
    def user_code(self) -> Iterator[None]:
        with self.live.counting(), self.live.making("suspended"):
            yield

    @override
    def note_input(self, message: Message) -> None:
        if self.live.kind == "activations":
            self.live.claim(message.tensors, "activations")

    @override
    def note_output(self, message: Message) -> None:
        self._output = sum({one.untyped_storage()._cdata: one.nbytes for one in message.tensors}.values())
        if self.live.kind == "workspace":
            self.live.claim(message.tensors, "messages")

    @override
    def note_gathered(self) -> None:
        self.live.claim((p.data for p in self.parameters if self.is_whole(p)), "gathered")

    @override
    def note_kept(self, stage: int, tensors: Sequence[Tensor]) -> None:
        self.live.claim(tensors, "gathered")
        self._kept[stage] = sum({one.untyped_storage()._cdata: one.nbytes for one in tensors}.values())
        self._most_kept = max(self._most_kept, sum(self._kept.values()))

    def _claim_gradients(self) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                self.live.claim([parameter.grad], "gathered" if self.is_whole(parameter) else "gradients")

    def _before_block(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._ids:
            self._around_blocks[threading.get_ident()].append(self.live.kind)
            if self.live.kind == "suspended":
                self.live.kind = "activations"

    def _after_block(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._ids:
            self.live.kind = self._around_blocks[threading.get_ident()].pop()

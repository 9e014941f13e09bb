"""Counts the bytes of this process's live tensors by what they are for, and remembers the most at one time.

    operation returns a tensor    + bytes of its memory, as the current kind: "activations", "messages", ...
    memory is freed               - the same bytes
    claim(tensors, kind)          what is there already, or has become something else, counts as that kind

Memory that several tensors share counts once. What an operation needs inside itself, and what other libraries allocate,
is not seen.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

MemoryKind = Literal[
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "suspended",
    "queue",
    "messages",
    "workspace",
    "other",
]
"""What tensors are for; `MemoryReport` explains the kinds."""
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
        """what is made from now on"""
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
        """Begin a new peak, and return the one before; what is live stays counted."""
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
            self._look_at_sizes()
        if (total := self.num_bytes) > self.peak.num_bytes:
            self.peak = Peak(total, dict(self._held))

    def _look_at_sizes(self) -> None:
        for memory in self._memories.values():
            storage = None if memory.reference is None else memory.reference()
            if storage is not None:
                self._held[memory.kind] += storage.nbytes() - memory.num_bytes
                memory.num_bytes = storage.nbytes()

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

"""Measures what each action of a batch changes in its rank's memory, and the most bytes at one time.

    held before the F of a stage  --->  most held during it  --->  held after it
          |<------------------ most ---------->|                        |
          |<------------------ change ---------------------------------->|

On an accelerator torch's allocator knows how many bytes are held. On the CPU `LiveBytes` counts those of live tensors:
what an operation needs inside itself, and what other libraries allocate, is not seen there.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from lightning_hanayo.pipeline_parallel.message import Message
from lightning_hanayo.schedule import Action


class AllocatedBytes:
    """Bytes of torch's allocator. `restart` resets the allocator's own peak, too."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    @property
    def num_bytes(self) -> int:
        """Held now."""
        return int(self._module.memory_allocated(self._device))

    def restart(self) -> int:
        """Return the most since the last call, and begin anew."""
        peak = int(self._module.max_memory_allocated(self._device))
        self._module.reset_peak_memory_stats(self._device)
        return peak

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Do nothing: the allocator counts what all threads make."""
        yield

    def note(self, tensors: Iterable[Any]) -> None:
        """Do nothing: they are counted."""


class LiveBytes:
    """Bytes of live tensors. Memory that several tensors share counts once.

    Args:
        device: the type of the device whose memory counts; also "meta".

    Example:
        >>> live = LiveBytes()
        >>> with live.counting():
        ...     x = torch.zeros(1000)
        >>> live.num_bytes
        4000
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._sizes: dict[int, int] = {}
        """bytes by storage"""
        self._freed: deque[int] = deque()
        """storages, noted in whichever thread frees them; taken off in a thread that counts"""
        self._num_bytes = 0
        self.peak = 0
        """since `restart`"""
        self._threads: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Held now."""
        while self._freed:
            self._num_bytes -= self._sizes.pop(self._freed.popleft())
        return self._num_bytes

    def restart(self) -> int:
        """Return the most since the last call, and begin anew."""
        before, self.peak = self.peak, self.num_bytes
        return before

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
        """Count those among `tensors` that aren't counted yet, and what has been resized."""
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.device.type == self._device:
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.num_bytes)

    def _note(self, storage: torch.UntypedStorage) -> None:
        held, key, size = self.num_bytes, storage._cdata, storage.nbytes()  # first, as a new one may have an old key
        if key not in self._sizes:
            weakref.finalize(storage, self._freed.append, key).atexit = False
        self._num_bytes = held + size - self._sizes.get(key, 0)
        self._sizes[key] = size


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


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' memory. What they share counts once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


@dataclass(frozen=True)
class ActionBytes:
    """What one action does to the bytes that its rank holds."""

    change: int
    """from before it to after it"""
    most: int
    """the most during it, beyond what was held before"""
    gradients: int
    """of the change, what `.grad` has got"""
    suspended: int
    """of the change, what the user's code outside the stack has made"""
    input: int
    """of the message that it uses"""
    output: int
    """of the message that it makes for another stage"""


@dataclass
class BatchBytes:
    """What was measured of one batch on one rank."""

    actions: dict[Action, ActionBytes] = field(default_factory=dict)
    before_actions: int = 0
    """made in the batch before its first action"""
    keeps_gradients: bool = False
    """whether there were gradients then"""
    repeats: bool = False
    """whether actions ran several times, in several passes through the stack; then the last ones are in `actions`"""
    kept: int = 0
    """the most that stages have kept for later micro-batches"""
    peak: int = 0
    """from its begin to the end of the optimizer's step"""
    step: int = 0
    """the most during the optimizer's step, beyond what was held before it"""


@dataclass(eq=False)
class MemoryTrace:
    """Measures the batches of one rank."""

    blocks: Sequence[nn.Module]
    """of the stack: what they make in a forward is no user code's"""
    parameters: Sequence[nn.Parameter]
    """that this rank trains"""
    held: LiveBytes | AllocatedBytes
    last: BatchBytes = field(default_factory=BatchBytes, init=False)
    """what was measured of the last batch"""
    peak: int = field(default=0, init=False)
    """the most that was ever held"""
    _begin: int = field(default=0, init=False)
    """held when the batch began"""
    _end: int = field(default=0, init=False)
    """held before its optimizer step"""
    _kept: dict[int, int] = field(default_factory=dict, init=False)
    """by stage: what it keeps for later micro-batches"""
    _output: int = field(default=0, init=False)
    """bytes of the message that the current action has made"""
    _suspended: int = field(default=0, init=False)
    """bytes that user code has made in the current action"""
    _in_user_code: dict[int, int] = field(default_factory=dict, init=False)
    """by thread: what was held when user code began, or when a block returned to it"""

    def __post_init__(self) -> None:
        self._ids = {id(block) for block in self.blocks}

    @contextmanager
    def batch(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Inside it the rank runs a batch; `tensors` are the model's and the optimizer's."""
        self.held.note(tensors)
        self.held.note(p.grad for p in self.parameters)
        self.held.restart()
        self.last, self._begin = BatchBytes(), self.held.num_bytes
        self._kept.clear()
        hooks = (
            torch_module.register_module_forward_pre_hook(self._before_block),
            torch_module.register_module_forward_hook(self._after_block, always_call=True),
        )
        try:
            with self.held.counting():
                yield
        finally:
            for hook in hooks:
                hook.remove()
        self._lap()
        self._end = self.held.num_bytes

    @contextmanager
    def optimizer_step(self) -> Iterator[None]:
        """Inside it the optimizer steps, and before that it may run the batch."""
        with self.held.counting():
            yield
        self.last.step = max(0, self._lap() - self._end)

    @contextmanager
    def action(self, action: Action, received: Message | None) -> Iterator[None]:
        """Entered for each action, with the message that it uses."""
        used = 0 if received is None else storage_bytes(received.tensors)
        del received  # so that it is freed as soon as the action is done with it
        self._lap()
        batch, before, gradients = self.last, self.held.num_bytes, self._gradients()
        if not batch.actions:
            batch.before_actions, batch.keeps_gradients = before - self._begin, gradients > 0
        batch.repeats |= action in batch.actions
        self._output = self._suspended = 0
        yield
        after, most = self.held.num_bytes, self._lap()
        batch.actions[action] = ActionBytes(
            change=after - before,
            most=most - before,
            gradients=self._gradients() - gradients,
            suspended=self._suspended,
            input=used,
            output=self._output,
        )

    def note_made(self, action: Action, made: Message | None, kept: Sequence[Tensor]) -> None:
        """Called after an action: its message to another stage, and what its stage keeps for later micro-batches."""
        self._output = 0 if made is None else storage_bytes(made.tensors)
        self._kept[action.stage] = storage_bytes(kept)
        self.last.kept = max(self.last.kept, sum(self._kept.values()))

    @contextmanager
    def user_code(self) -> Iterator[None]:
        """Entered by each step of the user's, in its thread."""
        thread = threading.get_ident()
        with self.held.counting():
            self._in_user_code[thread] = self.held.num_bytes
            try:
                yield
            finally:
                self._suspended += self.held.num_bytes - self._in_user_code.pop(thread)

    def _before_block(self, module: nn.Module, _: Any) -> None:
        if id(module) in self._ids and (thread := threading.get_ident()) in self._in_user_code:
            self._suspended += self.held.num_bytes - self._in_user_code[thread]

    def _after_block(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._ids and (thread := threading.get_ident()) in self._in_user_code:
            self._in_user_code[thread] = self.held.num_bytes

    def _gradients(self) -> int:
        return sum(p.grad.untyped_storage().nbytes() for p in self.parameters if p.grad is not None)

    def _lap(self) -> int:
        """The most since the last call."""
        most = self.held.restart()
        self.last.peak, self.peak = max(self.last.peak, most), max(self.peak, most)
        return most

"""Counts the bytes of live tensors on CPUs, where torch's allocator doesn't, and the most that a fit holds.

batch        0         1         2: everything is there now, gradients, the optimizer's states and buffers
counted      |----------------------------------| of all that the fit makes
peak                             |--------------| the most during the last batch and its optimizer step

What an operation needs inside itself, and what other libraries allocate, isn't seen.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from typing_extensions import override

from recipes.benchmarks.fits import fit_on_rank


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


class _LastBatch(Callback):
    """Restarts the peak when the last of `count` batches begins, and keeps it when its optimizer step has ended."""

    def __init__(self, live: LiveBytes, count: int) -> None:
        self._live, self._last = live, count - 1
        self.peak = 0

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._live.restart()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._last:
            self.peak = self._live.peak


def peak_of_fit(
    rank: int, num_ranks: int, make: Callable[[], L.LightningModule], batches: Sequence[Any], **options: Any
) -> int:
    """The most bytes of live tensors that this rank holds in the last batch of a fit and its optimizer step.

    Args:
        rank: this one.
        num_ranks: of the fit, whose process group exists.
        make: makes the module, all of whose tensors count.
        batches: of which two or more come before the last one.
        options: of the Trainer.
    """
    live = LiveBytes()
    last = _LastBatch(live, len(batches))
    with live.counting():
        module = make()
        # A step runs in a thread of its own. By the class, as the module's own attributes are put back after dry runs.
        step = live.counting()(type(module).training_step)
        module.__class__ = type(type(module).__name__, (type(module),), {"training_step": step})
        fit_on_rank(rank, num_ranks, module, batches, callbacks=[last], **options)
    return last.peak

"""ResizedBytes: counts live bytes where memory is resized outside operations, as FSDP2 frees parameters."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage
from typing_extensions import override

from lightning_hanayo.pipeline_parallel.profiling.memory import LiveBytes


class ResizedBytes(LiveBytes):
    """Looks at the sizes of all live memory before it takes a peak for one."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: weakref.WeakSet[UntypedStorage] = weakref.WeakSet()

    @override
    def note(self, tensors: Iterable[Any]) -> None:
        peak, found = self.peak, list(tensors)
        super().note(found)
        self._storages.update(one.untyped_storage() for one in found if isinstance(one, Tensor) and one.is_cpu)
        if self.peak > peak:
            for storage in tuple(self._storages):
                self._note(storage)
            self.peak = max(peak, self.num_bytes)

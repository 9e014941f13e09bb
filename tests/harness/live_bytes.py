"""Counts the bytes of tensors that code makes and holds."""

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Live(TorchDispatchMode):
    """Counts the bytes of all storages that were made under it and still exist.

    Args:
        known: tensors that were there before; neither they nor views of them are counted.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.num_bytes = 0
        self.peak = 0
        """the most at one time"""
        self._before = [tensor.untyped_storage() for tensor in known]
        self._known: set[int] = {storage._cdata for storage in self._before}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if not isinstance(tensor, Tensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.num_bytes += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.num_bytes)
        return result

    def _gone(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.num_bytes -= num_bytes

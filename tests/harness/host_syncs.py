"""Records where the host would wait for a GPU, on a machine without one.

On the GPU counts what is there for sure, or is computed from it: parameters and buffers, batches that a Trainer has
moved, and tensors that are made with `device=` a `torch.device`. In host memory counts what is made without a device or
with `device="cpu"`: numbers for the host, and messages between hosts.

    flags = torch.tensor([1.0])                in host memory: read at any time
    norm = parameter.grad.norm()               on the GPU: `float(norm)` is a wait, and so is `norm.to("cpu")`
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

import lightning_hanayo
from lightning_hanayo.pipeline_parallel import object_collectives
from lightning_hanayo.pipeline_parallel.capture.threads import ThreadState

_PACKAGE = Path(lightning_hanayo.__file__).parent
_READING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "is_nonzero")
_GPU = torch.device("cuda:0")
_FACTORIES = ("tensor", "as_tensor", "zeros", "ones", "full", "empty", "arange", "empty_like", "zeros_like")
_TO_HOST = ("cpu", "tolist", "numpy", "__array__", "__reduce_ex__")
"""methods that copy to the host without an operation that a mode sees on a CPU"""


class HostSyncs:
    """Records while `is_on`. `places` counts what waits, by file, function and operation."""

    def __init__(self) -> None:
        self.is_on = False
        self.places: Counter[str] = Counter()
        self._on_device: dict[int, StorageWeakRef] = {}

    def put_on_device(self, values: Any) -> None:
        """From now on these tensors count as on the GPU."""
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and not tensor.is_meta and tensor.layout is torch.strided:
                storage = torch._C.TensorBase.untyped_storage(tensor)
                self._on_device[storage._cdata] = StorageWeakRef(storage)

    def is_on_device(self, tensor: Any) -> bool:
        """Whether it counts as on the GPU."""
        if not isinstance(tensor, Tensor) or tensor.is_meta or tensor.layout is not torch.strided:
            return False
        reference = self._on_device.get(torch._C.TensorBase.untyped_storage(tensor)._cdata)
        return reference is not None and not reference.expired()

    def note(self, operation: str) -> None:
        """Record a wait, if the package is the one that waits."""
        if self.is_on and (place := _place()) is not None:
            self.places[f"{place} {operation}"] += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch all operations of this process while open, in the threads of steps, too."""
        applied = ThreadState.applied

        @contextmanager
        def applied_and_watched(state: ThreadState) -> Iterator[None]:
            with applied(state), _Mode(self):
                yield

        patch = pytest.MonkeyPatch()
        patch.setattr(object_collectives, "_device_of", lambda one: _GPU if self.is_on_device(one) else one.device)
        patch.setattr(object_collectives, "_own", lambda kind, device=None: torch.device("cpu"))
        patch.setattr(ThreadState, "applied", applied_and_watched)
        patch.setattr(Tensor, "to", self._moving(Tensor.to))
        for name in _TO_HOST:
            patch.setattr(Tensor, name, self._reading(name, getattr(Tensor, name)))
        for name in _FACTORIES:
            patch.setattr(torch, name, self._making(name, getattr(torch, name)))
        try:
            with _Mode(self):
                yield
        finally:
            patch.undo()

    def _in_host_memory(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self._on_device.pop(copy.untyped_storage()._cdata, None)
        return copy

    def _reading(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.is_on_device(tensor):
                self.note(name)
                tensor = self._in_host_memory(tensor) if name == "cpu" else tensor
            return method(tensor, *args, **kwargs)

        return read

    def _moving(self, method: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            target = kwargs.get("device", args[0] if args else None)
            is_there = self.is_on_device(tensor)
            moved = method(tensor, *args, **kwargs)
            if is_there and isinstance(target, str):
                self.note("to the host")
                return self._in_host_memory(moved)
            if not is_there and isinstance(target, torch.device) and not moved.is_meta:
                if not kwargs.get("non_blocking", False):
                    self.note("to the device")
                moved = moved.clone()
                self.put_on_device(moved)
            return moved

        return to

    def _making(self, name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def make(*args: Any, **kwargs: Any) -> Tensor:
            made = function(*args, **kwargs)
            device = kwargs.get("device")
            if isinstance(device, torch.device) and device.type != "meta":
                self.put_on_device(made)
                if name in ("tensor", "as_tensor"):
                    self.note("to the device")
            elif device == "cpu":
                self._on_device.pop(made.untyped_storage()._cdata, None)
            return made

        return make


class _Mode(TorchDispatchMode):
    """What is computed from tensors on the device is there, too."""

    def __init__(self, syncs: HostSyncs) -> None:
        super().__init__()
        self._syncs = syncs

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        places = [self._syncs.is_on_device(tensor) for tensor in tensors]
        if any(places):
            selects = name == "index" and any(tensor.dtype is torch.bool for tensor in tensors[1:])
            if name in _READING or selects or (name == "copy_" and not all(places)):
                self._syncs.note(name)
        result = func(*args, **(kwargs or {}))
        if places and (places[0] if name == "copy_" else any(places)):
            self._syncs.put_on_device(result)
        return result


def _place() -> str | None:
    """The file and function of the package that is running, unless it runs code of the user, Lightning or a library."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE)}:{frame.f_code.co_name}"
        if path.name == "distributed_c10d.py":
            return None  # torch's messages between hosts
        if "torch" not in path.parts and path.name not in (Path(__file__).name, "pickle.py", "contextlib.py"):
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return None

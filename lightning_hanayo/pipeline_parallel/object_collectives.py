"""Object collectives: the only ones of the package. No object that crosses ranks carries a device of its sender.

sender                                       receiver
{"loss": cuda:5, "logits": cuda:5, "y": cpu} {"loss": cuda:1, "logits": cuda:1, "y": cpu}
  '-- one buffer, one copy to the host --------> one copy to its own device, of which the tensors are views
      the rest, pickled ----------------------->

Torch's own object collectives pickle a tensor together with the index of its device: the receiver would get it on the
sender's GPU, after a copy for each tensor.

Gives all ranks of a group the first rank's values of tensors that any of them has changed, such as buffers.

        rank 0    rank 1    which ranks have changed it    afterwards, on both
mean    0.3       0.4       0 and 1: agreed                0.3: one broadcast of all that has changed
step    7         7         1                              7
table   ...       ...       none                           nothing is sent
"""

import base64
import io
import pickle
import zlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from typing_extensions import override

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.monitor.waiting import Waiting
from lightning_hanayo.pipeline_parallel.p2p import ALIGN, Message, SendBuffer, Spec, spec_of, unpack
from lightning_hanayo.versions import identity_of

numbers: "WeakKeyDictionary[dist.ProcessGroup, int]" = WeakKeyDictionary()
"""how many broadcasts of objects this rank has begun in each group"""


class Broadcast(NamedTuple):
    """Tells a broadcast of an object from all others, for reports of runs in which nothing moves."""

    source: int
    """rank of the world"""
    group: str
    number: int
    """of the broadcasts in that group, from 1 on"""


_SAME_EVERYWHERE = ("cpu", "meta")
"""devices that mean the same on all ranks"""


def all_gather_objects(
    group: dist.ProcessGroup, value: Any, device_group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Return every rank's `value`, which must be picklable, in rank order. Called by all ranks of the group.

    Tensors that were on an accelerator come to this rank's current device. With a `device_group`, of the same ranks and
    for tensors of the device, they don't pass host memory: no host waits for a device.
    """
    values: list[Any] = [None] * group.size()
    if device_group is None:
        dist.all_gather_object(values, to_bytes(value), group)
        return [from_bytes(data) for data in values]
    packed, buffers = _pack(value)
    dist.all_gather_object(values, packed, group)
    gathered = _all_gather_buffers(values, buffers, device_group)
    return [_unpack(*one) for one in zip(values, gathered, strict=True)]


def gather_objects(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return every rank's `value`, which must be picklable, on rank 0 of the group, and [] on the others.

    Called by all ranks of the group. Devices as in `all_gather_objects`.
    """
    values: list[Any] = [None] * group.size() if group.rank() == 0 else []
    dist.gather_object(to_bytes(value), values or None, group=group, group_dst=0)
    return [from_bytes(data) for data in values]


def broadcast_object(value: Any, group: dist.ProcessGroup | None = None, source: int = 0) -> Any:
    """Return the `value` of rank `source` of the group (None: the world), which must be picklable, on all its ranks.

    Called by all of them. Devices as in `all_gather_objects`.
    """
    if not dist.is_initialized():
        return value
    is_source = dist.get_rank(group) == source
    values = [to_bytes(value) if is_source else None]
    waiting: AbstractContextManager[object] = nullcontext()  # torch counts the world's collectives
    if group is not None:
        numbers[group] = numbers.get(group, 0) + 1
        if not is_source:
            sender = Broadcast(dist.get_global_rank(group, source), group.group_name, numbers[group])
            waiting = Waiting("an object that it broadcasts", sender)
    with waiting:
        dist.broadcast_object_list(values, group=group, group_src=source)
    return value if is_source else from_bytes(values[0])


def to_bytes(value: Any) -> bytes:
    """Return `value` as bytes for another process, with one copy from each device to the host."""
    packed, buffers = _pack(value)
    return pickle.dumps((packed, [buffer.cpu() for buffer in buffers]))


def from_bytes(data: Any, device: torch.device | None = None) -> Any:
    """Return the value that `to_bytes` was given. Tensors that weren't in host memory are views of one buffer.

    The buffer is on `device`; None: the current one.
    """
    packed, buffers = pickle.loads(data)
    return _unpack(packed, [buffer.to(_own(kind, device), non_blocking=True)  # from unpinned memory: copied on return
                            for (kind, _), buffer in zip(packed.specs, buffers, strict=True)], device)  # fmt: skip


def to_text(value: Any) -> str:
    """Return `value` as text, for a relay."""
    return base64.b64encode(to_bytes(value)).decode()


def from_text(text: str, device: torch.device | None = None) -> Any:
    """Return the value that `to_text` was given; `device` as in `from_bytes`."""
    return from_bytes(base64.b64decode(text), device)


class _Packed(NamedTuple):
    """An object without its tensors on accelerators, and for each device its type and how to read its buffer."""

    pickled: bytes
    specs: list[tuple[str, bytes]]

    @property
    def num_bytes(self) -> int:
        """Of all buffers."""
        return sum(Spec.from_bytes(spec).num_bytes for _, spec in self.specs)


def _pack(value: Any) -> tuple[_Packed, list[Tensor]]:
    """Return the rest of an object, and its tensors on accelerators: a buffer on each device."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    specs, buffers = [], []
    for device, tensors in pickler.tensors.items():
        sent = SendBuffer(spec_of(Message((), tuple(tensors))), tensors[0].device)
        sent.fill(tensors)
        specs.append((device.type, sent.spec.to_bytes()))
        buffers.append(sent.buffer)
    return _Packed(file.getvalue(), specs), buffers


def _unpack(packed: _Packed, buffers: Sequence[Tensor], device: torch.device | None = None) -> Any:
    """Return the packed object, whose tensors are views of the buffers."""
    pairs = zip(packed.specs, buffers, strict=True)
    tensors = [unpack(Spec.from_bytes(spec), buffer).tensors for (_, spec), buffer in pairs]
    return _Unpickler(packed.pickled, tensors, device).load()


def _all_gather_buffers(
    packed: Sequence[_Packed], buffers: Sequence[Tensor], group: dist.ProcessGroup
) -> list[list[Tensor]]:
    """Return all ranks' buffers, on this rank's device. None has more than one."""
    sizes = [one.num_bytes for one in packed]
    if not any(sizes):
        return [[] for _ in sizes]
    kind = next(kind for one in packed for kind, _ in one.specs)
    device = buffers[0].device if buffers else _own(kind)
    own = torch.zeros(-(-max(sizes) // ALIGN) * ALIGN, dtype=torch.uint8, device=device)
    for buffer in buffers:
        own[: buffer.nbytes] = buffer.view(torch.uint8)
    parts = own.new_empty(len(sizes), len(own)).unbind()
    dist.all_gather(list(parts), own, group=group)
    return [[part[:size]] if size else [] for part, size in zip(parts, sizes, strict=True)]


def _own(kind: str, device: torch.device | None = None) -> torch.device:
    """This rank's device of that type."""
    return torch.device(kind, torch.get_device_module(kind).current_device()) if device is None else device


class _Pickler(pickle.Pickler):
    """Leaves out tensors on accelerators, the indices of devices, and single numbers, which torch pickles in 100 us.

    A subclass with rules of its own, such as one with a scale inside, is pickled by them: they pickle plain tensors.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: dict[torch.device, list[Tensor]] = {}
        self._known: dict[int, tuple[Tensor, Any]] = {}

    @override
    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, torch.device) and value.type not in _SAME_EVERYWHERE:
            return "device", value.type
        if not isinstance(value, Tensor):
            return None
        has_own_rules = type(value).__reduce_ex__ is not Tensor.__reduce_ex__ or is_traceable_wrapper_subclass(value)
        device = _device_of(value)
        if has_own_rules or value.layout is not torch.strided or device.type in _SAME_EVERYWHERE:
            is_number = type(value) is Tensor and device.type == "cpu" and not (value.ndim or value.requires_grad)
            if not is_number or vars(value):
                return None
            self._known.setdefault(id(value), (value, ("number", len(self._known), value.item(), value.dtype)))
        if id(value) not in self._known:
            tensors = self.tensors.setdefault(device, [])
            tensors.append(value.detach().as_subclass(Tensor).requires_grad_(value.requires_grad))
            kind = None if type(value) is Tensor else type(value)
            left_out = "tensor", list(self.tensors).index(device), len(tensors) - 1, kind, vars(value)
            self._known[id(value)] = value, left_out
        return self._known[id(value)][1]


class _Unpickler(pickle.Unpickler):
    """Puts back the tensors that the pickler has left out; devices become this rank's."""

    def __init__(self, pickled: bytes, tensors: Sequence[Sequence[Tensor]], device: torch.device | None) -> None:
        super().__init__(io.BytesIO(pickled))
        self._tensors = tensors
        self._device = device
        self._numbers: dict[int, Tensor] = {}

    @override
    def persistent_load(self, reference: Any) -> Any:
        name, *place = reference
        if name == "device":
            return _own(place[0], self._device)
        if name == "number":
            index, number, dtype = place
            if index not in self._numbers:
                self._numbers[index] = torch.tensor(number, dtype=dtype)
            return self._numbers[index]
        buffer, index, kind, attributes = place
        tensor = self._tensors[buffer][index]
        tensor = tensor if kind is None else tensor.as_subclass(kind)
        vars(tensor).update(attributes)
        return tensor


def _device_of(value: Tensor) -> torch.device:
    """Where its memory is: stand-ins for tensors of other ranks name the device of those."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.device


@dataclass(eq=False, repr=False)
class ReplicatedTensors:
    """Tensors that each rank of a group holds and changes by itself."""

    control: dist.ProcessGroup
    """the ranks, for CPU tensors"""
    tensors: dist.ProcessGroup
    """the same ranks, for tensors of `device`"""
    device: torch.device
    """over which values are sent"""
    _kept: Mapping[str, Tensor | None] = field(default_factory=dict, init=False)
    """as they were after the last update, so that no other tensor takes the id of one that was replaced"""
    _versions: Mapping[str, tuple[int, int]] = field(default_factory=dict, init=False)

    def update(self, own: Mapping[str, Tensor | None], changed: Collection[str] = ()) -> bool:
        """Give `own` tensors, in place, the first rank's values, where any rank has changed them since the last update.

        Called by all ranks, with the same names; in the first update all are new. `changed` names more that this rank
        has changed: a change through `.data` leaves no other trace.

        Returns:
            Whether anything had changed, which is the same on all ranks.

        Raises:
            UnsupportedError: a tensor hasn't the same shape and dtype on all ranks.
        """
        if not own:
            return False
        versions = _versions(own)
        flags = [int(name in changed or version != self._versions.get(name)) for name, version in versions.items()]
        found = self._changed_anywhere(own, flags)
        sent = [tensor for name in found if (tensor := own[name]) is not None and not tensor.is_meta]
        if sent:
            # as bytes: gloo knows neither complex numbers nor 16-bit integers
            values = [one.detach().to(self.device).contiguous().reshape(-1).view(torch.uint8) for one in sent]
            message = torch.cat(values)
            dist.broadcast(message, group=self.tensors, group_src=0)
            with torch.inference_mode():  # a tensor that an evaluation has made can be changed nowhere else
                for tensor, part in zip(sent, message.split([len(value) for value in values]), strict=True):
                    tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a copy is aligned for its dtype
        self._kept, self._versions = own, _versions(own)
        return bool(found)

    def _changed_anywhere(self, own: Mapping[str, Tensor | None], flags: list[int]) -> list[str]:
        """The names that have a flag on any rank."""
        specs = [0 if tensor is None else _code(tensor.dtype, tensor.shape) for tensor in own.values()]
        largest = torch.tensor([flags, specs, [-spec for spec in specs]])
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.control)
        for (name, tensor), highest, negated_lowest in zip(own.items(), *largest[1:].tolist(), strict=True):
            if highest != -negated_lowest:
                dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
                spec = "None" if tensor is None else f"{dtype} {list(tensor.shape)}"
                raise UnsupportedError(
                    f"{name} is a buffer ({spec} on this rank) whose shape or dtype differs between data ranks, which "
                    f"take rank 0's values. Make it the same on all, or keep it in an attribute that is no buffer."
                )
        return [name for name, flag in zip(own, largest[0].tolist(), strict=True) if flag]


def _versions(tensors: Mapping[str, Tensor | None]) -> dict[str, tuple[int, int]]:
    return {name: identity_of(tensor) for name, tensor in tensors.items()}


@cache
def _code(dtype: torch.dtype, shape: torch.Size) -> int:
    """A number for dtype and shape, the same on all ranks."""
    return zlib.crc32(f"{dtype} {list(shape)}".encode())

"""Stand for values of pipeline rank 0 on the ranks above it, in what hooks read there: outputs, batches, lists.

    rank 0     outputs = {"loss": 0.5, "logits": [8, 1000]}     batch = {"x": [8, 3, 224, 224], "names": [...]}
    rank 1     outputs = {"loss": 0.5, "logits": no values}     batch = {"x": no values, "names": [...]}

Numbers, strings and small tensors are sent. Of large tensors the shape is: what is computed from them has no values
either, and may be logged, as the metrics of all ranks are those of rank 0.
"""

import pickle
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.partial_values import PartialValues
from lightning_hanayo.partition.missing_values import MissingValues, Owner, without_values
from lightning_hanayo.runtime.batches.containers import Attribute, children, with_children
from lightning_hanayo.runtime.batches.refusal import step_to
from lightning_hanayo.runtime.capture.proxy import Valueless, user_line
from lightning_hanayo.runtime.comm.object_collectives import from_text

WAY_OUT = (
    "Log it with self.log, which takes it as it is, compute it in the step and return the number, or read it under "
    "`if self.trainer.is_global_zero:`, where nothing may depend on it that all ranks do"
)
BATCH_BUDGET = 2**16
"""bytes of tensors that are sent after each batch whose end a hook reads"""
EPOCH_BUDGET = 2**28
"""bytes of what steps have collected in an epoch"""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, np.generic)


class Missing(Valueless):
    """Something that can't be read here; every use raises an error that says what, why, and the way out."""

    __slots__ = ("_what", "_way_out", "_why")

    def __init__(self, what: str, why: str, way_out: str) -> None:
        self._what, self._why, self._way_out = what, why, way_out

    def __repr__(self) -> str:
        """Say what is missing."""
        return f"<{self._what}: {self._why}>"

    def __reduce__(self) -> Any:
        """A copy is missing, too."""
        return Missing, (self._what, self._why, self._way_out)

    @override
    def refuse(self, operation: str) -> NoReturn:
        raise UnsupportedError(f"{user_line()} reads {self._what} ({operation}), but {self._why}. {self._way_out}.")


@dataclass(frozen=True)
class _Shape:
    """What is sent of a large tensor, and of one that is computed from a parameter of another pipeline rank."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int = 0
    """the pipeline rank that has the values"""


def from_packed(text: str, device: torch.device) -> Any:
    """The values of what a `Packer` has made, received as text, and stand-ins for those that weren't sent."""

    def unpack(value: Any) -> Any:
        if isinstance(value, _Shape):
            shape = torch.empty(value.shape, dtype=value.dtype, device="meta")
            return without_values(shape, Owner(value.name, value.rank, device, WAY_OUT))
        inside = children(value)
        if not inside:
            return value
        try:
            return with_children(value, {key: unpack(item) for key, item in inside.items()})
        except HanayoError:
            return Missing(f"a {type(value).__name__}", "pipeline rank 0 alone has all its values", WAY_OUT)

    return unpack(from_text(text, device))


class Packer:
    """Makes what can be sent of values, with at most `budget` bytes of tensors; what comes first is sent first."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def pack(self, name: str, value: Any) -> Any:
        """The value, with something that can be sent for all that is in it."""
        if isinstance(value, MissingValues):
            return _Shape(name, tuple(value.shape), value.dtype, value._owner.rank)
        if isinstance(value, Missing):
            return value
        if isinstance(value, PartialValues):
            return Missing(name, "each rank of a cube has a part of it", WAY_OUT)
        if isinstance(value, Tensor):
            return self._tensor(name, value.detach())
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, np.ndarray) and value.dtype != object and self._fits(value.nbytes):
            return value
        inside = children(value)
        if inside is not None and _can_be_sent(type(value)):
            packed = {key: self.pack(f"{name}{step_to(value, key)}", item) for key, item in inside.items()}
            with suppress(HanayoError):
                return with_children(value, packed)
        return Missing(name, f"this {type(value).__name__} is on pipeline rank 0 alone", WAY_OUT)

    def _tensor(self, name: str, tensor: Tensor) -> Any:
        if tensor.is_meta or tensor.layout != torch.strided or not self._fits(tensor.nbytes):
            return _Shape(name, tuple(tensor.shape), tensor.dtype)
        return tensor.clone()  # a view would bring its whole storage

    def _fits(self, num_bytes: int) -> bool:
        fits = num_bytes <= self._budget
        self._budget -= num_bytes if fits else 0
        return fits


def hide_changed(batch: Any, before: Sequence[Any], pieces: Sequence[Any]) -> None:
    """Put stand-ins into `batch` for what steps have set in their `pieces`, or removed: each of them its own.

    `before`: the children of the pieces before the steps.
    """
    changed: dict[Any, None] = {}
    for old, piece in zip(before, pieces, strict=True):
        if old is not None and piece is not batch:
            new = children(piece) or {}
            keys = (key for key in old | new if not isinstance(key, Attribute))
            changed |= {key: None for key in keys if key not in old or new.get(key) is not old[key]}
    for key in changed:
        name = f"batch{step_to(batch, key)}"
        value = Missing(name, "each step has set its own", "Store it as an attribute of the module, or return it")
        if not isinstance(batch, MutableMapping | list):
            object.__setattr__(batch, key, value)
            continue
        try:
            batch[key] = value
        except Exception:  # the user's class takes tensors only, or a list has grown
            if not isinstance(batch, list):
                batch.pop(key, None)


def sent_or_own(value: Any, own: Any) -> Any:
    """What pipeline rank 0 has sent, or what this rank has where the other has no values.

    A hook on all ranks may have kept each parameter, or something computed from it such as its moving average: each
    rank has those of its own parameters.
    """
    if isinstance(value, dict) and isinstance(own, dict):
        return {key: _in_dictionary(item, own.get(key, item)) for key, item in value.items()}
    if isinstance(value, list) and isinstance(own, list) and len(value) == len(own):
        return [sent_or_own(*pair) for pair in zip(value, own, strict=True)]
    if not isinstance(own, Tensor) or not isinstance(value, Missing | Tensor):
        return value
    is_own = isinstance(own, nn.Parameter) or isinstance(value, Missing)
    return own if is_own or (isinstance(value, MissingValues) and value._owner.rank > 0) else value


def _in_dictionary(value: Any, own: Any) -> Any:
    """The same, and what this rank has where the other can't send it: a module or a function."""
    return own if isinstance(value, Missing) else sent_or_own(value, own)


def _can_be_sent(kind: type) -> bool:
    try:
        pickle.dumps(kind)
    except (pickle.PicklingError, AttributeError):
        return False
    return True

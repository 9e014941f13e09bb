"""Gives the pipeline ranks above 0 the values that only pipeline rank 0 has of data and steps: for all ranks' hooks.

rank 0   steps: self.outputs = [a, b, c]   --values-->   rank 1   self.outputs = [a, b, c]
all      on_train_epoch_end: self.log("mean", torch.stack(self.outputs).mean()); self.outputs.clear()

Numbers, strings and small tensors are sent with their values, large tensors as their shape. Values that are computed
from a shape are missing, too, and may be logged, as the metrics of all ranks are those of rank 0.
"""

import pickle
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.partial_values import PartialValues
from lightning_hanayo.partition.guards import MissingValues, Owner, without_values
from lightning_hanayo.pipeline_parallel.batches.microbatches import children, with_children
from lightning_hanayo.pipeline_parallel.batches.reader import step_to
from lightning_hanayo.pipeline_parallel.object_collectives import from_text, to_text
from lightning_hanayo.strategy.run import Run
from lightning_hanayo.strategy.user_code.collected import Collections, Missing, name_of

WAY_OUT = (
    "Log it with self.log, which takes it as it is, compute it in the step and return the number, or read it under "
    "`if self.trainer.is_global_zero:`, where nothing may depend on it that all ranks do"
)
BATCH_BUDGET = 2**16
"""bytes of tensors that are sent after each batch whose end a hook reads"""
EPOCH_BUDGET = 2**28
"""bytes of tensors that are sent at the end of an epoch"""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, np.generic)


@dataclass(eq=False)
class HandOver:
    """One pipeline rank's part in giving values to the ranks above 0."""

    run: Run
    """of the Trainer; its generators are those from which data sets and steps may draw"""
    collections: Collections
    """the lists and attributes that steps set"""
    before_batches: bool
    """whether hooks run between the reading of each batch and its steps"""
    after_batches: bool
    """whether hooks that run after each batch may read values that its steps have set"""
    after_epochs: bool
    """whether those at the end of an epoch may"""

    def at_epoch_end(self) -> None:
        """Send the values set by steps, and by hooks that run on pipeline rank 0 alone. Called by all ranks."""
        self.run.generators.share()
        if self.after_epochs:
            self._exchange(EPOCH_BUDGET, {})

    def before_batch(self) -> None:
        """Called by all ranks once a batch is read and transferred."""
        if self.before_batches:
            self.run.generators.share()

    def after_batch(self, **values: Any) -> dict[str, Any]:
        """Send the values set by the steps of a batch, and these values of pipeline rank 0.

        Returns the values, or their stand-ins; this rank's own if nothing reads them.
        """
        if not self.after_batches:
            return values
        self.run.generators.share()
        return self._exchange(BATCH_BUDGET, values)

    def _exchange(self, budget: int, values: dict[str, Any]) -> dict[str, Any]:
        relay = self.run.pipe_relay
        if relay.transport.num_ranks == 1:
            return values
        if relay.transport.rank == 0:
            packer = Packer(budget)
            changed = self.collections.take_changed()
            left = {path: (start, packer.pack(name_of(path), value)) for path, (start, value) in changed.items()}
            relay.broadcast("values", to_text((left, {name: packer.pack(name, v) for name, v in values.items()})))
            return values
        left, received = from_packed(relay.broadcast("values"), self.run.device)
        self.collections.give(left)
        return dict(received)


@dataclass(frozen=True)
class _Shape:
    """Sent in place of a large tensor, and of one that is computed from a parameter of another pipeline rank."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rank: int = 0
    """the pipeline rank that has the values"""


def from_packed(text: str, device: torch.device) -> Any:
    """The received values of a `Packer`, and stand-ins for those that weren't sent."""

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
    """Prepares values to be sent, with at most `budget` bytes of tensors: the first ones."""

    def __init__(self, budget: int) -> None:
        self._budget = budget

    def pack(self, name: str, value: Any) -> Any:
        """The value, in which all that can't be sent, or is too large, has a stand-in."""
        if isinstance(value, MissingValues):
            return _Shape(name, tuple(value.shape), value.dtype, value._owner.rank)
        if isinstance(value, Missing):
            return value
        if isinstance(value, PartialValues):
            return Missing(name, "each rank of a cube has a part of it", WAY_OUT)
        if isinstance(value, Tensor):
            if value.is_meta or value.layout != torch.strided or not self._fits(value.nbytes):
                return _Shape(name, tuple(value.shape), value.dtype)
            return value.detach().clone()  # a view would bring its whole storage
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, np.ndarray) and value.dtype != object and self._fits(value.nbytes):
            return value
        inside = children(value)
        if inside is not None and _is_importable(type(value)):
            packed = {key: self.pack(f"{name}{step_to(value, key)}", item) for key, item in inside.items()}
            with suppress(HanayoError):
                return with_children(value, packed)
        return Missing(name, f"this {type(value).__name__} is on pipeline rank 0 alone", WAY_OUT)

    def _fits(self, num_bytes: int) -> bool:
        """Whether the budget allows for as many bytes; then they are taken from it."""
        fits = num_bytes <= self._budget
        self._budget -= num_bytes if fits else 0
        return fits


def _is_importable(kind: type) -> bool:
    """Whether another process finds the class under its name."""
    try:
        pickle.dumps(kind)
    except (pickle.PicklingError, AttributeError):
        return False
    return True

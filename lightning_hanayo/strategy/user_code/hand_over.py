"""Gives the pipeline ranks above 0 the values that only pipeline rank 0 has of data and steps: for all ranks' hooks.

rank 0   steps: self.outputs = [a, b, c]   --values-->   rank 1   self.outputs = [a, b, c]
all      on_train_epoch_end: self.log("mean", torch.stack(self.outputs).mean()); self.outputs.clear()
"""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_hanayo.pipeline_parallel.comm.object_collectives import to_text
from lightning_hanayo.pipeline_parallel.rng import SharedGenerators
from lightning_hanayo.pipeline_parallel.transport import Relay
from lightning_hanayo.strategy.user_code.collected import (
    BATCH_BUDGET,
    EPOCH_BUDGET,
    Collections,
    Packer,
    from_packed,
    name_of,
)


@dataclass(eq=False)
class HandOver:
    """One pipeline rank's part in giving values to the ranks above 0."""

    relay: Relay
    """over the ranks of the pipeline"""
    device: torch.device
    """where received tensors go"""
    collections: Collections
    """the lists and attributes that steps set"""
    generators: SharedGenerators
    """of random numbers, from which data sets and steps may draw"""
    before_batches: bool
    """whether hooks run between the reading of each batch and its steps"""
    after_batches: bool
    """whether hooks that run after each batch may read values that its steps have set"""
    after_epochs: bool
    """whether those at the end of an epoch may"""

    def at_epoch_end(self) -> None:
        """Send the values set by steps, and by hooks that run on pipeline rank 0 alone. Called by all ranks."""
        self.generators.share()
        if self.after_epochs:
            self._exchange(EPOCH_BUDGET, {})

    def before_batch(self) -> None:
        """Called by all ranks once a batch is read and transferred."""
        if self.before_batches:
            self.generators.share()

    def after_batch(self, **values: Any) -> dict[str, Any]:
        """Send the values set by the steps of a batch, and these values of pipeline rank 0.

        Returns the values, or their stand-ins; this rank's own if nothing reads them.
        """
        if not self.after_batches:
            return values
        self.generators.share()
        return self._exchange(BATCH_BUDGET, values)

    def _exchange(self, budget: int, values: dict[str, Any]) -> dict[str, Any]:
        if self.relay.transport.num_ranks == 1:
            return values
        if self.relay.transport.rank == 0:
            packer = Packer(budget)
            changed = self.collections.take_changed()
            left = {path: (start, packer.pack(name_of(path), value)) for path, (start, value) in changed.items()}
            self.relay.broadcast("values", to_text((left, {name: packer.pack(name, v) for name, v in values.items()})))
            return values
        left, received = from_packed(self.relay.broadcast("values"), self.device)
        self.collections.give(left)
        return dict(received)

"""Gives the pipeline ranks above 0 what only pipeline rank 0 has of data and steps: for the hooks of all ranks.

rank 0   steps: self.outputs = [a, b, c]   --values-->   rank 1   self.outputs = [a, b, c]
all      on_train_epoch_end: self.log("mean", torch.stack(self.outputs).mean()); self.outputs.clear()
"""

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


class HandOver:
    """One pipeline rank's side of it.

    Args:
        relay: over the ranks of the pipeline.
        device: where received tensors go.
        collections: what steps collect.
        generators: of random numbers, from which data sets and steps may draw.
        before_batches: whether hooks run between the reading of each batch and its steps.
        after_batches: whether hooks that run after each batch may read what its steps have left.
        after_epochs: whether those at the end of an epoch may.
    """

    def __init__(
        self,
        relay: Relay,
        device: torch.device,
        collections: Collections,
        generators: SharedGenerators,
        *,
        before_batches: bool,
        after_batches: bool,
        after_epochs: bool,
    ) -> None:
        self._relay = relay
        self._device = device
        self._collections = collections
        self._generators = generators
        self._before_batches = before_batches
        self.after_batches = after_batches
        self._after_epochs = after_epochs

    @property
    def is_read(self) -> bool:
        """Whether a hook of the user's may read what steps have left."""
        return self._after_epochs

    def at_epoch_end(self) -> None:
        """Hand over what steps, and hooks that run on pipeline rank 0 alone, have left. Called by all ranks."""
        self._generators.share()
        if self._after_epochs:
            self._exchange(EPOCH_BUDGET, {})

    def before_batch(self) -> None:
        """Called by all ranks once a batch is read and transferred."""
        if self._before_batches:
            self._generators.share()

    def after_batch(self, **values: Any) -> dict[str, Any]:
        """Hand over what the steps of a batch have left, and these values of pipeline rank 0.

        Returns the values, or what stands for them; what this rank has if nothing reads them.
        """
        if not self.after_batches:
            return values
        self._generators.share()
        return self._exchange(BATCH_BUDGET, values)

    def _exchange(self, budget: int, values: dict[str, Any]) -> dict[str, Any]:
        if self._relay.transport.num_ranks == 1:
            return values
        if self._relay.transport.rank == 0:
            packer = Packer(budget)
            changed = self._collections.take_changed()
            left = {path: (start, packer.pack(name_of(path), value)) for path, (start, value) in changed.items()}
            self._relay.broadcast("values", to_text((left, {name: packer.pack(name, v) for name, v in values.items()})))
            return values
        left, received = from_packed(self._relay.broadcast("values"), self._device)
        self._collections.give(left)
        return dict(received)

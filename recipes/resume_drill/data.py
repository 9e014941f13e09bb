"""Batches of tokens in a shuffled order, from a loader that can go on in the middle of an epoch."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor

VOCABULARY, CONTEXT, NUM_SAMPLES = 64, 16, 512


class Shuffled:
    """Shuffles in each epoch, and says where it is, as torchdata's `StatefulDataLoader` does.

    order      5 2 7 0 | 3 6 1 4        data ranks 0 | 1, batch_size=2
    position   ^-^ ^-^ | ^-^ ^-^
    """

    def __init__(self, tokens: Tensor, batch_size: int, data_rank: int, num_data_ranks: int) -> None:
        self.tokens, self.batch_size = tokens, batch_size
        self._share = len(tokens) // num_data_ranks
        self._start = data_rank * self._share
        self._epoch = self._position = 0

    def __len__(self) -> int:
        return self._share // self.batch_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self._position >= len(self):
            self._epoch, self._position = self._epoch + 1, 0
        order = torch.randperm(len(self.tokens), generator=torch.Generator().manual_seed(self._epoch))
        own = order[self._start : self._start + self._share].split(self.batch_size)
        while self._position < len(self):
            self._position += 1
            samples = self.tokens[own[self._position - 1]]
            yield {"input_ids": samples[:, :-1], "labels": samples[:, 1:]}

    def state_dict(self) -> dict[str, Any]:
        """Where it is."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there."""
        self._epoch, self._position = state["epoch"], state["position"]


class DrillData(L.LightningDataModule):
    """Random sentences; each data rank sees a share of them.

    Args:
        batch_size: Samples per batch and data rank.
    """

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(VOCABULARY, (NUM_SAMPLES, CONTEXT + 1), generator=generator)

    def train_dataloader(self) -> Shuffled:
        """The share of this data rank."""
        assert self.trainer is not None
        kwargs = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        return Shuffled(self.tokens, self.batch_size, kwargs["rank"], kwargs["num_replicas"])

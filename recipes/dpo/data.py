"""Pairs of answers to "go on counting": upwards is preferred to downwards. They are made from their numbers."""

import warnings

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Pair = dict[str, Tensor]

# The samples are computed: a worker process would only copy them.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class CountingPairs(Dataset[Pair]):
    """Numbers below `vocab_size`, as tokens: a start, and then answers that count on from it.

    chosen    7 8 9 | 10 11 12 13
    rejected  7 8 9 | 8 7 6 5
    """

    def __init__(self, count: int, context: int, vocab_size: int, seed: int) -> None:
        self.count, self.context, self.vocab_size, self.seed = count, context, vocab_size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Pair:
        random = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        first = int(torch.randint(self.vocab_size, (), generator=random))
        asked = int(torch.randint(2, self.context // 2, (), generator=random))
        steps = torch.arange(self.context)
        turned = torch.where(steps < asked, steps, 2 * (asked - 1) - steps)
        return {
            "chosen": (first + steps) % self.vocab_size,
            "rejected": (first + turned) % self.vocab_size,
            "is_answer": steps >= asked,
        }


class PairData(L.LightningDataModule):
    """Pairs to train on, and others to validate with.

    Args:
        vocab_size: How many numbers there are.
        context: Tokens per answer, with its start.
        num_train: Pairs to train on.
        num_val: Pairs to validate with.
        batch_size: Pairs per batch and data-parallel rank.
    """

    def __init__(
        self, vocab_size: int = 64, context: int = 24, num_train: int = 8192, num_val: int = 256, batch_size: int = 8
    ) -> None:
        super().__init__()
        self.vocab_size, self.context, self.batch_size = vocab_size, context, batch_size
        self.train = CountingPairs(num_train, context, vocab_size, seed=1)
        self.val = CountingPairs(num_val, context, vocab_size, seed=2)

    def train_dataloader(self) -> DataLoader[Pair]:
        """Shuffled each epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Pair]:
        """In order."""
        return DataLoader(self.val, self.batch_size)

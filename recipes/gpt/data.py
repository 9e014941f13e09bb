"""Text data: blocks of tokens for a language model, as an ordinary LightningDataModule."""

import warnings
from typing import Any

import lightning as L
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from recipes.gpt.text import documents, places
from recipes.gpt.tokens import tokens

Batch = dict[str, Tensor]

# The samples are in memory: a worker process would only copy them.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")


class TokenBlocks(Dataset[Batch]):
    """Consecutive blocks of `context` tokens, each token with the one that follows it as its label.

    tokens   0 1 2 3 4 5 6 7 8        context = 4
    block 0  0 1 2 3 -> 1 2 3 4
    block 1          4 5 6 7 -> 5 6 7 8
    """

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return max(0, (len(self.tokens) - 1) // self.context)

    def __getitem__(self, index: int) -> Batch:
        start = index * self.context
        block = self.tokens[start : start + self.context + 1]
        return {"input_ids": block[:-1], "labels": block[1:]}


class TextData(L.LightningDataModule):
    """Text from this machine, encoded with a byte-pair encoding that is trained on it and cached.

    Args:
        path: A text file, a folder or a list of these; without one, the source of Python's own standard library.
        pattern: Which files of a folder to read.
        max_bytes: How much text to read at most, in bytes.
        vocab_size: How many tokens the encoding has.
        context: Tokens per sample.
        batch_size: Samples per batch and data-parallel rank.
        val_fraction: The share of the tokens, at the end of the text, that is kept for validation.
        cache_dir: Where the encoded text is kept for the next run.
        tokenizer: A tokenizer.json to encode with, such as a pretrained model's; without one it is trained.
    """

    def __init__(
        self,
        path: str | list[str] | None = None,
        pattern: str = "**/*.txt",
        max_bytes: int = 5_000_000,
        vocab_size: int = 2048,
        context: int = 128,
        batch_size: int = 16,
        val_fraction: float = 0.05,
        cache_dir: str = "runs/cache",
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 < val_fraction < 1.0:
            raise ValueError(f"val_fraction={val_fraction} must lie between 0 and 1")
        self.places = places(path)
        self.pattern = pattern
        self.max_bytes = max_bytes
        self.vocab_size = vocab_size
        self.context = context
        self.batch_size = batch_size
        self.val_fraction = val_fraction
        self.cache_dir = cache_dir
        self.tokenizer = tokenizer
        self.train: Dataset[Batch] | None = None
        self.val: Dataset[Batch] | None = None

    def prepare_data(self) -> None:
        """Fill the cache. Lightning calls this in one process per machine."""
        self._tokens()

    def setup(self, stage: str) -> None:
        """Read the cache and split it by position: training never sees the validation text."""
        if self.train is not None:
            return
        row = self._tokens()
        cut = len(row) - max(self.context + 1, round(len(row) * self.val_fraction))
        if cut <= self.context:
            raise ValueError(f"{len(row)} tokens of text are too few for samples of context={self.context} tokens")
        self.train, self.val = self._samples(row[:cut]), self._samples(row[cut:], validation=True)

    def train_dataloader(self) -> DataLoader[Batch]:
        """The blocks of the first part of the text, shuffled each epoch."""
        assert self.train is not None
        return self._loader(self.train, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        """The blocks of the last part of the text, in order."""
        assert self.val is not None
        return self._loader(self.val)

    def test_dataloader(self) -> DataLoader[Batch]:
        """The validation blocks: there is no separate test part."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Batch]:
        """The validation blocks."""
        return self.val_dataloader()

    def _tokens(self) -> Tensor:
        return tokens(
            documents(self.places, self.pattern, self.max_bytes), self.vocab_size, self.cache_dir, self.tokenizer
        )

    def _samples(self, row: Tensor, validation: bool = False) -> Dataset[Batch]:
        return TokenBlocks(row, self.context)

    def _loader(self, samples: Dataset[Batch], **options: Any) -> DataLoader[Batch]:
        return DataLoader(samples, batch_size=self.batch_size, **options)

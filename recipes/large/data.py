"""Packed text for long training runs: documents in a row, cut into samples without padding.

    documents   a a a | b b | c c c c c c c | d ...        | is the token at a document's end
    samples     [a a a | b b |] [c c c c c c] [c | d ...]  of `context` tokens

Files are read once per epoch, in order. A resumed run goes on where it was: a checkpoint holds the number of samples
that each data rank has read.
"""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

Batch = dict[str, Tensor]


class PackedText(IterableDataset[Batch]):
    """The samples of one data rank: every `num_ranks`-th one.

    Args:
        files: text files with a document per line.
        tokenizer: a tokenizer.json, such as a pretrained model's.
        context: tokens per sample.
        end: the token at the end of each document.
    """

    def __init__(self, files: list[Path], tokenizer: str, context: int, end: int) -> None:
        self.files, self.tokenizer, self.context, self.end = files, tokenizer, context, end
        self.rank, self.num_ranks = 0, 1
        self.num_read = 0
        """samples of this rank"""

    def __iter__(self) -> Iterator[Batch]:
        own = islice(self._samples(), self.num_read * self.num_ranks + self.rank, None, self.num_ranks)
        for sample in own:
            self.num_read += 1
            yield {"input_ids": torch.tensor(sample)}
        self.num_read = 0  # the next epoch

    def _samples(self) -> Iterator[list[int]]:
        from tokenizers import Tokenizer

        tokenizer, rest = Tokenizer.from_file(self.tokenizer), list[int]()
        for path in self.files:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    rest += [*tokenizer.encode(line.rstrip("\n")).ids, self.end]
                    while len(rest) >= self.context:
                        yield rest[: self.context]
                        rest = rest[self.context :]


class PackedLoader(DataLoader[Batch]):
    """Gives batches of packed text in the process of its rank, and knows its place in it."""

    dataset: PackedText

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"num_read": self.dataset.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.dataset.num_read = state["num_read"]


class RandomTokens(IterableDataset[Batch]):
    """Random samples, to measure throughput with.

    Args:
        vocab_size: tokens that there are.
        context: tokens per sample.
    """

    def __init__(self, vocab_size: int, context: int) -> None:
        self.vocab_size, self.context = vocab_size, context
        self.rank, self.num_ranks = 0, 1

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.rank)
        while True:
            yield {"input_ids": torch.randint(self.vocab_size, (self.context,), generator=generator)}


class Pretraining(L.LightningDataModule):
    """Packed text from a folder, or random tokens where there is none.

    Args:
        vocab_size: tokens that there are.
        context: tokens per sample.
        batch_size: samples per batch and data rank.
        path: a folder of .txt files with a document per line; None: random tokens.
        tokenizer: the tokenizer.json to encode them with.
        end: the token at the end of each document.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int,
        batch_size: int = 1,
        path: str | None = None,
        tokenizer: str | None = None,
        end: int = 0,
    ) -> None:
        super().__init__()
        if path is not None and tokenizer is None:
            raise ValueError(f"path={path!r} needs a tokenizer: the path of a tokenizer.json")
        self.batch_size = batch_size
        self.samples: PackedText | RandomTokens = RandomTokens(vocab_size, context)
        if path is not None:
            self.samples = PackedText(sorted(Path(path).glob("**/*.txt")), str(tokenizer), context, end)

    def train_dataloader(self) -> DataLoader[Batch]:
        """The samples of this data rank."""
        sampler: Any = (self.trainer and self.trainer.distributed_sampler_kwargs) or {}
        self.samples.rank, self.samples.num_ranks = sampler.get("rank", 0), sampler.get("num_replicas", 1)
        return (PackedLoader if isinstance(self.samples, PackedText) else DataLoader)(self.samples, self.batch_size)

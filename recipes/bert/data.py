"""Masked text: pieces of documents with some tokens hidden, as an ordinary LightningDataModule."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from recipes.gpt.data import Batch, TextData
from recipes.gpt.text import documents
from recipes.gpt.tokens import tokens

PADDING = 0
"""the end-of-text token, which no piece holds"""
IGNORED = -100


def pieces(row: Tensor, context: int) -> list[Tensor]:
    """The documents of a row of tokens, each cut into pieces of at most `context` tokens.

    row      5 6 7 8 9 0 5 6 0        context = 3; 0 ends a document
    pieces   5 6 7 | 8 9 | 5 6
    """
    documents = row.tensor_split(torch.nonzero(row == PADDING).flatten())
    kept = (document[document != PADDING] for document in documents)
    return [piece for document in kept if len(document) for piece in document.split(context)]


class MaskedPieces(Dataset[Batch]):
    """Pieces with a share of their tokens hidden, at least one each. These are the labels; all others are -100.

    Of the hidden ones, 80 % become the mask token, 10 % a random token, and 10 % stay as they are (BERT, section 3.1).
    The choice depends only on the epoch and the piece's index: it is new in each epoch and the same on every rank.

    Args:
        pieces: tokens, [length] each.
        mask_token: the largest token, which no piece holds.
        share: the share of the tokens to hide.
        epoch: returns the current epoch.
    """

    def __init__(self, pieces: list[Tensor], mask_token: int, share: float, epoch: Callable[[], int]) -> None:
        self.pieces = pieces
        self.mask_token = mask_token
        self.share = share
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, index: int) -> Batch:
        random = np.random.default_rng((self.epoch(), index))
        piece = self.pieces[index].numpy()
        hidden = random.choice(len(piece), max(1, round(self.share * len(piece))), replace=False)
        ids, labels = piece.copy(), np.full_like(piece, IGNORED)
        labels[hidden] = piece[hidden]
        draw = random.random(len(hidden))
        guesses = random.integers(PADDING + 1, self.mask_token, len(hidden))
        ids[hidden] = np.where(draw < 0.8, self.mask_token, np.where(draw < 0.9, guesses, piece[hidden]))
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def padded(samples: list[Batch]) -> Batch:
    """Pad samples to the longest one; `attention_mask` [batch, longest] is False on padding."""
    columns = {name: [sample[name] for sample in samples] for name in ("input_ids", "labels")}
    ids = pad_sequence(columns["input_ids"], batch_first=True, padding_value=PADDING)
    labels = pad_sequence(columns["labels"], batch_first=True, padding_value=IGNORED)
    return {"input_ids": ids, "labels": labels, "attention_mask": ids != PADDING}


class MaskedTextData(TextData):
    """The text of `TextData` by documents, with hidden tokens; validation always hides the same ones.

    Args:
        mask_share: The share of the tokens to hide.
        options: As for `TextData`; the last token of the vocabulary is the mask.
    """

    def __init__(self, mask_share: float = 0.15, **options: Any) -> None:
        super().__init__(**options)
        if not 0.0 < mask_share < 1.0:
            raise ValueError(f"mask_share={mask_share} must lie between 0 and 1")
        self.mask_share = mask_share

    def _tokens(self) -> Tensor:
        return tokens(documents(self.places, self.pattern, self.max_bytes), self.vocab_size - 1, self.cache_dir)

    def _samples(self, row: Tensor, validation: bool = False) -> Dataset[Batch]:
        epoch = self._validation_epoch if validation else self._epoch
        return MaskedPieces(pieces(row, self.context), self.vocab_size - 1, self.mask_share, epoch)

    def _loader(self, samples: Dataset[Batch], **options: Any) -> DataLoader[Batch]:
        return super()._loader(samples, collate_fn=padded, **options)

    def _epoch(self) -> int:
        return self.trainer.current_epoch if self.trainer else 0

    def _validation_epoch(self) -> int:
        return 0

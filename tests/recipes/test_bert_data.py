"""Masked text cuts documents into pieces and hides some tokens of each, the same ones on every rank and at any time."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipes.bert.data import IGNORED, MaskedPieces, MaskedTextData, padded, pieces

MASK = 99
TEXT = "the cat sat on the mat, and the dog sat on the cat\n" * 40


def hiding(*lengths: int, share: float = 0.15, epoch: int = 0) -> MaskedPieces:
    return MaskedPieces(
        [torch.arange(1, length + 1) % (MASK - 1) + 1 for length in lengths], MASK, share, lambda: epoch
    )


def data(tmp_path: Path, **options: object) -> MaskedTextData:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name + TEXT)
    settings = {"path": str(tmp_path), "vocab_size": 300, "context": 8, "batch_size": 4, "val_fraction": 0.2}
    return MaskedTextData(**(settings | {"cache_dir": str(tmp_path / "cache")} | options))  # type: ignore[arg-type]


def test_pieces_end_with_their_document() -> None:
    row = torch.tensor([5, 6, 7, 8, 9, 0, 0, 5, 6, 0])
    assert [piece.tolist() for piece in pieces(row, 3)] == [[5, 6, 7], [8, 9], [5, 6]]
    assert [piece.tolist() for piece in pieces(row[3:9], 3)] == [[8, 9], [5, 6]], "a row may begin and end anywhere"


def test_a_share_is_hidden_and_only_hidden_tokens_are_labels() -> None:
    sample = hiding(4000)[0]
    original, ids, labels = hiding(4000).pieces[0], sample["input_ids"], sample["labels"]
    hidden = labels != IGNORED
    assert int(hidden.sum()) == 600
    assert torch.equal(labels[hidden], original[hidden]) and torch.equal(ids[~hidden], original[~hidden])
    kinds = [int(kind.sum()) / 600 for kind in (ids == MASK, hidden & (ids == original))]
    assert kinds == pytest.approx([0.8, 0.1], abs=0.04)
    assert int(ids.min()) > 0 and int(ids.max()) == MASK


def test_every_piece_has_a_label() -> None:
    assert [int((sample["labels"] != IGNORED).sum()) for sample in map(hiding(1, 3, 20).__getitem__, range(3))] == [
        1,
        1,
        3,
    ]


def test_hidden_tokens_depend_only_on_epoch_and_index() -> None:
    first, again, next_epoch = hiding(40, 40), hiding(40, 40), hiding(40, 40, epoch=1)
    again[1]  # in another order
    assert torch.equal(first[0]["input_ids"], again[0]["input_ids"])
    assert not torch.equal(first[0]["labels"] == IGNORED, first[1]["labels"] == IGNORED)
    assert not torch.equal(first[0]["labels"] == IGNORED, next_epoch[0]["labels"] == IGNORED)


def test_short_pieces_are_padded() -> None:
    batch = padded([hiding(2)[0], hiding(4)[0]])
    assert batch["attention_mask"].tolist() == [[True, True, False, False], [True] * 4]
    assert batch["input_ids"][0, 2:].tolist() == [0, 0] and batch["labels"][0, 2:].tolist() == [IGNORED] * 2
    assert {value.shape for value in batch.values()} == {(2, 4)}


def test_each_epoch_hides_other_training_tokens_and_the_same_validation_tokens(tmp_path: Path) -> None:
    module = data(tmp_path)
    module.prepare_data()
    module.setup("fit")
    module.trainer = SimpleNamespace(current_epoch=0)  # type: ignore[assignment]
    seen = [(module.train[0], next(iter(module.val_dataloader())))]  # type: ignore[index]
    module.trainer = SimpleNamespace(current_epoch=1)  # type: ignore[assignment]
    seen.append((module.train[0], next(iter(module.val_dataloader()))))  # type: ignore[index]
    (train, val), (next_train, next_val) = seen
    assert not torch.equal(train["labels"], next_train["labels"])
    assert all(torch.equal(val[name], next_val[name]) for name in ("input_ids", "labels", "attention_mask"))
    assert next(iter(module.train_dataloader()))["input_ids"].shape[0] == 4
    assert max(int(piece.max()) for piece in module.train.pieces) < 299, "the last token is the mask"  # type: ignore[union-attr]


def test_an_impossible_share_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mask_share=1.5 must lie between 0 and 1"):
        data(tmp_path, mask_share=1.5)

"""The text is the same everywhere, encoded once, and can be the user's own."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from recipes.gpt import tokens as tokens_module
from recipes.gpt.data import TextData, TokenBlocks
from recipes.gpt.text import documents
from recipes.gpt.tokens import key, tokens

TEXTS = ["the cat sat on the mat, and the dog sat on the cat\n" * 40, "a mat is a mat\n" * 40]


def small(tmp_path: Path, **options: object) -> TextData:
    settings = {"vocab_size": 300, "context": 8, "batch_size": 4, "cache_dir": str(tmp_path / "cache")}
    return TextData(**(settings | options))  # type: ignore[arg-type]


def test_blocks_overlap_by_the_token_to_predict() -> None:
    blocks = TokenBlocks(torch.arange(9), context=4)
    assert [(block["input_ids"].tolist(), block["labels"].tolist()) for block in (blocks[0], blocks[1])] == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([4, 5, 6, 7], [5, 6, 7, 8]),
    ]
    assert len(blocks) == 2


def test_the_default_text_is_pythons_library_in_a_fixed_order() -> None:
    first, again = (documents(None, "", max_bytes=200_000) for _ in range(2))
    assert first == again
    assert "import" in "".join(first) and 190_000 < sum(len(text.encode()) for text in first) <= 200_000


def test_the_cache_is_filled_once_and_then_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = tokens(TEXTS, 300, str(tmp_path))
    monkeypatch.setattr(tokens_module, "_train", lambda *_: pytest.fail("trained again"))
    assert torch.equal(tokens(TEXTS, 300, str(tmp_path)), first)
    decoded = Tokenizer.from_file(str(tmp_path / key(TEXTS, 300) / "tokenizer.json")).decode(first.tolist())
    assert decoded == "".join(TEXTS)


def test_other_texts_and_other_sizes_have_other_cache_keys() -> None:
    assert len({key(["ab", "c"], 300), key(["a", "bc"], 300), key(["abc"], 300), key(["abc"], 301)}) == 4


def test_several_processes_may_fill_the_cache_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda _: tokens(TEXTS, 300, str(tmp_path)), range(4)))
    assert all(torch.equal(row, rows[0]) for row in rows)
    assert [entry.name for entry in tmp_path.iterdir()] == [key(TEXTS, 300)], "no draft is left behind"


def test_a_folder_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "texts" / "more").mkdir(parents=True)
    (tmp_path / "texts" / "b.txt").write_text(TEXTS[0])
    (tmp_path / "texts" / "more" / "a.txt").write_text(TEXTS[1])
    (tmp_path / "texts" / "c.csv").write_text("not,a,text")
    data = small(tmp_path, path=str(tmp_path / "texts"), val_fraction=0.2)
    data.prepare_data()
    data.setup("fit")
    assert documents(data.places, data.pattern, 10**6) == TEXTS
    assert data.train is not None and data.val is not None
    whole = torch.cat([data.train.tokens, data.val.tokens])
    assert torch.equal(whole, tokens(TEXTS, 300, data.cache_dir)), "validation is the end of the text"
    batch = next(iter(data.train_dataloader()))
    assert batch["input_ids"].shape == batch["labels"].shape == (4, 8)


def test_errors_name_paths_that_do_not_exist(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no file or folder 'nowhere'"):
        small(tmp_path, path="nowhere")
    with pytest.raises(ValueError, match=r"pattern='\*\.md'"):
        small(tmp_path, path=str(tmp_path), pattern="*.md").prepare_data()


def test_too_little_text_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(ValueError, match="too few for samples of context=8"):
        small(tmp_path, path=str(tmp_path / "short.txt")).setup("fit")

"""Encodes texts with a byte-pair encoding trained on them, or a given one, and caches the tokens.

    <cache_dir>/<key>/tokenizer.json    the encoding, for `tokenizers.Tokenizer.from_file`
    <cache_dir>/<key>/tokens.npy        every document's tokens in a row, an end-of-text token after each

The key is a hash of the texts and the encoding, or its size, and a folder appears only when it is complete. So any
number of processes may ask at the same time: at worst several do the same work, and one result is kept.
"""

import os
import shutil
import tempfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from torch import Tensor

END_OF_TEXT = "<|endoftext|>"


def tokens(texts: list[str], vocab_size: int, cache_dir: str, tokenizer: str | None = None) -> Tensor:
    """The tokens of `texts` in a row, int64 [tokens]; trained and encoded only if the cache doesn't hold them.

    Raises:
        ValueError: the `tokenizer` has more tokens than `vocab_size`, or its file can't be read.
    """
    encoding = None if tokenizer is None else _given(tokenizer, vocab_size)
    folder = Path(cache_dir) / key(texts, vocab_size if encoding is None else encoding.to_str())
    if not folder.is_dir():
        _fill(folder, texts, encoding or _train(texts, vocab_size))
    return torch.from_numpy(np.load(folder / "tokens.npy").astype(np.int64))


def key(texts: list[str], encoding: int | str) -> str:
    """The name under which the cache keeps `texts` encoded by an encoding of that size, or as JSON."""
    digest = sha256(f"byte-level bpe {encoding}".encode())
    for text in texts:
        content = text.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:16]


def _given(file: str, vocab_size: int) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # tokenizers raises no other kind
        raise ValueError(f"tokenizer={file!r} can't be read: {error}") from None
    if tokenizer.get_vocab_size() > vocab_size:
        raise ValueError(f"{file} has {tokenizer.get_vocab_size()} tokens, and vocab_size={vocab_size}")
    return tokenizer


def _fill(folder: Path, texts: list[str], tokenizer: Tokenizer) -> None:
    """Encode into a temporary folder and rename it; if another process was faster, discard this one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        tokenizer.save(str(draft / "tokenizer.json"))
        encodings = tokenizer.encode_batch_fast([text + END_OF_TEXT for text in texts])
        np.save(
            draft / "tokens.npy", np.concatenate([np.asarray(encoding.ids, dtype=np.uint32) for encoding in encodings])
        )
        os.rename(draft, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _train(texts: list[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer

"""Describes a checkpoint: its files with sizes and hashes, and which parts of them make up which tensor.

manifest.json begins with a line that has a hash of all that follows, so that no other byte is looked at before it was
checked. Whatever the rest says is checked too: a hash shows damage, but anybody can compute it.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from xxhash import xxh3_128

from lightning_hanayo.checkpoint.format.header import ITEM_BYTES
from lightning_hanayo.checkpoint.format.json_checks import ImpossibleError, count, matching, require, typed
from lightning_hanayo.checkpoint.format.stored import (
    StoredFile,
    WholeTensor,
    known_file,
    parse_file,
    parse_tensor,
    tensor_document,
)
from lightning_hanayo.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = "lightning_hanayo checkpoint"
VERSION = 1
MAX_BYTES = 2**30
"""A longer manifest isn't read, nor another JSON document."""
_SAVE_ID = re.compile(r"[0-9a-f]{8,32}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}-([0-9a-f]{8,32})\.(safetensors|json)")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Args:
        save_id: eight or more hexadecimal digits, which the names of all files contain.
        step: optimizer steps.
        epoch: as Lightning counts them.
        created: when, in ISO 8601.
        layout: the sizes and the schedule of the run that saved it.
        files: by name.
        tensors: by name, such as "model/net.0.weight".
        texts: the file of each JSON document by its stem, such as "state" or "state-data-00001".
        about: other plain values.
    """

    save_id: str
    step: int
    epoch: int
    created: str
    layout: Mapping[str, Any]
    files: Mapping[str, StoredFile]
    tensors: Mapping[str, WholeTensor]
    texts: Mapping[str, str]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The bytes of all files but the manifest."""
        return sum(file.num_bytes for file in self.files.values())

    def to_bytes(self) -> bytes:
        """Returns the content of manifest.json.

        Raises:
            CheckpointError: `from_bytes` would refuse it, say because a part of a tensor is missing.
        """
        document = {
            "save_id": self.save_id,
            "step": self.step,
            "epoch": self.epoch,
            "created": self.created,
            "layout": self.layout,
            "about": self.about,
            "texts": self.texts,
            "files": {name: {"bytes": one.num_bytes, "xxh3_128": one.xxh3_128} for name, one in self.files.items()},
            "tensors": {name: tensor_document(name, one) for name, one in self.tensors.items()},
        }
        body = _one_line_each(document).encode()
        with _checked(f"The checkpoint can't be saved: the new {MANIFEST}"):
            _manifest(json.loads(body, parse_constant=_no_constant))
        first = {"format": FORMAT, "version": VERSION, "xxh3_128": xxh3_128(body).hexdigest()}
        return json.dumps(first).encode() + b"\n" + body

    @staticmethod
    def from_bytes(data: bytes, where: str) -> "Manifest":
        """Read and check the content of manifest.json.

        Args:
            where: its path, for messages.

        Raises:
            CheckpointError: it is damaged, of another format or of a newer version, or says something impossible.
        """
        body = _body(data, where)
        with _checked(where):
            return _manifest(json.loads(body, parse_constant=_no_constant))


def files_named_in(data: bytes, where: str) -> Collection[str]:
    """Returns the names of a manifest's files, whatever else it says: much faster than to check all regions.

    Raises:
        CheckpointError: as `Manifest.from_bytes`, as far as the files are concerned.
    """
    body = _body(data, where)
    with _checked(where):
        document = typed(json.loads(body, parse_constant=_no_constant), dict, "the document")
        save_id = matching(document.get("save_id"), _SAVE_ID, "the save id")
        return [_file_name(name, save_id) for name in _dict(document, "files")]


def _one_line_each(document: Mapping[str, Any]) -> str:
    """JSON with a line for each file and tensor."""
    lines = []
    for name, value in document.items():
        if name in ("files", "tensors"):
            entries = ",\n".join(f"  {json.dumps(key)}: {json.dumps(one)}" for key, one in value.items())
            lines.append(f'"{name}": {{\n{entries}\n}}')
        else:
            lines.append(f"{json.dumps(name)}: {json.dumps(value)}")
    return "{" + ",\n".join(lines) + "}\n"


def _body(data: bytes, where: str) -> bytes:
    """All but the first line, if that says the right format, version and hash."""
    line, _, body = data.partition(b"\n")
    first = _first_line(line, where)
    if first["version"] != VERSION:
        raise CheckpointError(
            f"{where} is of version {first['version']!r}, and this lightning_hanayo reads version {VERSION}. Read it "
            f"with a newer one: pip install --upgrade lightning_hanayo"
        )
    if first["xxh3_128"] != xxh3_128(body).hexdigest():
        raise damaged(where, "its hash isn't the one in its first line")
    return body


def _first_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        first = json.loads(line[:1000])
    except (ValueError, RecursionError):
        raise damaged(where, "its first line is no JSON") from None
    if not isinstance(first, dict) or first.keys() != {"format", "version", "xxh3_128"} or first["format"] != FORMAT:
        raise damaged(where, "its first line isn't that of a checkpoint of HanayoStrategy")
    return first


def damaged(where: str, what: str) -> CheckpointError:
    """Returns the error of a file that isn't what was written."""
    return CheckpointError(f"{where} is damaged: {what}. Copy it again, or use an earlier checkpoint.")


@contextmanager
def _checked(where: str) -> Iterator[None]:
    try:
        yield
    except ImpossibleError as error:
        raise CheckpointError(f"{where} says what can't be: {error}. Use an earlier checkpoint.") from None
    except (RecursionError, ValueError) as error:
        raise damaged(where, f"it is no JSON ({error})") from None


def _no_constant(name: str) -> Any:
    raise ImpossibleError(f"it contains {name}")


def _manifest(document: Any) -> Manifest:
    document = typed(document, dict, "the document")
    save_id = matching(document.get("save_id"), _SAVE_ID, "the save id")
    files = {_file_name(name, save_id): parse_file(name, one) for name, one in _dict(document, "files").items()}
    tensors = {name: parse_tensor(name, one, files) for name, one in _dict(document, "tensors").items()}
    texts = {stem: known_file(name, files, ".json") for stem, name in _dict(document, "texts").items()}
    _check_files(files, tensors, texts)
    return Manifest(
        save_id,
        count(document.get("step"), "the step"),
        count(document.get("epoch"), "the epoch"),
        typed(document.get("created"), str, "the date"),
        _dict(document, "layout"),
        files,
        tensors,
        texts,
        _dict(document, "about"),
    )


def _check_files(files: Mapping[str, StoredFile], tensors: Mapping[str, WholeTensor], texts: Mapping[str, str]) -> None:
    """Each file must be named by parts that fit into it, or by one text, and each key by one part."""
    num_bytes: dict[str, int] = defaultdict(int)
    keys = Counter((part.file, part.key) for tensor in tensors.values() for part in tensor.parts)
    for tensor in tensors.values():
        for part in tensor.parts:
            num_bytes[part.file] += part.region.num_entries * ITEM_BYTES[tensor.dtype]
    for (file, key), number in keys.items():
        require(number == 1, f"{number} parts are the tensor {key!r} in {file}")
    for file, total in num_bytes.items():
        require(total < files[file].num_bytes, f"{file} is smaller than the tensors in it")
    require(len(set(texts.values())) == len(texts), "two documents are in one file")
    for file in texts.values():
        require(files[file].num_bytes <= MAX_BYTES, f"{file} has {files[file].num_bytes} bytes, which is absurd")
    unnamed = files.keys() - {file for file, _ in keys} - set(texts.values())
    require(not unnamed, f"nothing is said to be in {min(unnamed, default='')}")


def _file_name(name: str, save_id: str) -> str:
    """The name, if it is one of a file in this folder that this save has written."""
    found = _FILE.fullmatch(name)
    if found is None:
        raise ImpossibleError(f"{name!r} can't be a file of a checkpoint")
    require(found[1] == save_id, f"{name} is of another save than {save_id}")
    return name


def _dict(document: dict[str, Any], name: str) -> dict[str, Any]:
    return typed(document.get(name), dict, f"{name!r}")  # type: ignore[no-any-return]

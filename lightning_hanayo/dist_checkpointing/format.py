"""Describes a checkpoint: its files with sizes and hashes, and which parts of them make up which tensor.

manifest.json begins with a line that has a hash of all that follows, so that no other byte is looked at before it was
checked. Whatever the rest says is checked too: a hash shows damage, but anybody can compute it.

Says in which files a tensor is stored, and what a manifest says of a file.

Makes and checks the header of a safetensors file: which bytes of it are which tensor.

8 bytes    length of the header, little-endian
header     {"__metadata__": {...}, "<key>": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
           as JSON, filled up with spaces to a multiple of 8 bytes
data       one tensor after another, without gaps

Checks values of JSON documents that nobody has to believe.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

from xxhash import xxh3_128

from lightning_hanayo.dist_checkpointing.region import Region, partition_problem
from lightning_hanayo.errors import CheckpointError

_T = TypeVar("_T")
_MAX_DIMS = 32
"""that NumPy has in all its versions"""


@dataclass(frozen=True)
class StoredPart:
    """A part of a tensor: where it is, and which entries of the whole it holds."""

    file: str
    key: str
    region: Region
    xxh3_128: str
    """of its bytes"""


@dataclass(frozen=True)
class WholeTensor:
    """A tensor of the single-process model. `dtype` is named as safetensors does: "F32"."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredPart, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all its entries."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class StoredFile:
    """A file's size, and the hash of its header if it has tensors, else of the whole file."""

    num_bytes: int
    xxh3_128: str


def tensor_document(name: str, tensor: WholeTensor) -> dict[str, Any]:
    """Returns what a manifest says of a tensor, without keys that are the tensor's name, and runs of whole parts."""
    whole = Region.whole(tensor.shape)
    parts = []
    for part in tensor.parts:
        document: dict[str, Any] = {"file": part.file, "xxh3_128": part.xxh3_128}
        if part.key != name:
            document["key"] = part.key
        if part.region != whole:
            document["runs"] = part.region.runs
        parts.append(document)
    return {"dtype": tensor.dtype, "shape": tensor.shape, "parts": parts}


def parse_tensor(name: str, document: Mapping[str, Any], files: Mapping[str, StoredFile]) -> WholeTensor:
    """Returns the tensor that a manifest's document describes, in these files, or raises an ImpossibleError."""
    shape, dtype = tuple(document["shape"]), document["dtype"]
    require(name.isprintable(), f"the name {name!r} can't be shown")
    require(dtype in ITEM_BYTES, f"{name} has the dtype {dtype!r}, which nobody knows")
    require(len(shape) <= _MAX_DIMS, f"{name} has {len(shape)} dimensions")
    require(math.prod(size or 1 for size in shape) * ITEM_BYTES[dtype] < 2**63, f"the shape of {name} is absurd")
    parts = tuple(
        StoredPart(
            known_file(one["file"], files, ".safetensors"),
            one.get("key", name),
            _region(name, one["runs"]) if "runs" in one else Region.whole(shape),
            one["xxh3_128"],
        )
        for one in document["parts"]
    )
    problem = partition_problem(shape, [part.region for part in parts])
    require(problem is None, f"the parts of {name} don't make it up: {problem}")
    return WholeTensor(shape, dtype, parts)


def _region(name: str, document: list[list[list[int]]]) -> Region:
    pairs = all(len(run) == 2 and run[0] < run[1] for runs in document for run in runs)
    require(pairs, f"{name} has a run that is no pair of indices")
    return Region(tuple(tuple((start, stop) for start, stop in runs) for runs in document))


def known_file(name: str, files: Mapping[str, StoredFile], ending: str) -> str:
    """Returns the name of a file with this ending, which must be one of these."""
    require(name in files and name.endswith(ending), f"{name!r} isn't one of its files")
    return name


MANIFEST = "manifest.json"
FORMAT = "lightning_hanayo checkpoint"
VERSION = 1
MAX_BYTES = 2**30
"""A longer manifest isn't read, nor another JSON document."""
_HASH, _SAVE_ID = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{8,32}")
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}-[0-9a-f]{8,32}\.(safetensors|json)")
_PART = {"file": str, "xxh3_128": _HASH, "key": (str,), "runs": ([[[int]]],)}
_FORM: Mapping[str, Any] = {
    "save_id": _SAVE_ID, "step": int, "epoch": int, "created": str, "layout": {}, "about": {},
    "texts": {str: str}, "files": {_FILE: {"bytes": int, "xxh3_128": _HASH}},
    "tensors": {str: {"dtype": str, "shape": [int], "parts": [_PART]}},
}  # fmt: skip
"""of a manifest, as `check_form` takes it"""


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
        plain = ("save_id", "step", "epoch", "created", "layout", "about", "texts")
        document = {
            **{name: getattr(self, name) for name in plain},
            "files": {name: {"bytes": one.num_bytes, "xxh3_128": one.xxh3_128} for name, one in self.files.items()},
            "tensors": {name: tensor_document(name, one) for name, one in self.tensors.items()},
        }
        body = json.dumps(document).encode()
        _parsed(body, f"The checkpoint can't be saved: the new {MANIFEST}", _FORM, _manifest)
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
        return _parsed(_body(data, where), where, _FORM, _manifest)


def save_id_in(data: bytes, where: str) -> str:
    """Returns the id of a manifest's save, whatever else it says: much faster than to check all regions.

    Raises:
        CheckpointError: as `Manifest.from_bytes`, as far as the id is concerned.
    """
    return _parsed(_body(data, where), where, {"save_id": _SAVE_ID}, lambda document: str(document["save_id"]))


def _body(data: bytes, where: str) -> bytes:
    """All but the first line, if that says the right format, version and hash."""
    line, _, body = data.partition(b"\n")
    try:
        first = json.loads(line[:1000])
    except (ValueError, RecursionError):
        raise damaged(where, "its first line is no JSON") from None
    if not isinstance(first, dict) or first.keys() != {"format", "version", "xxh3_128"} or first["format"] != FORMAT:
        raise damaged(where, "its first line isn't that of a checkpoint of HanayoStrategy")
    if first["version"] != VERSION:
        raise CheckpointError(
            f"{where} is of version {first['version']!r}, and this lightning_hanayo reads version {VERSION}. Read it "
            f"with a newer one: pip install --upgrade lightning_hanayo"
        )
    if first["xxh3_128"] != xxh3_128(body).hexdigest():
        raise damaged(where, "its hash isn't the one in its first line")
    return body


def damaged(where: str, what: str) -> CheckpointError:
    """Returns the error of a file that isn't what was written."""
    return CheckpointError(f"{where} is damaged: {what}. Copy it again, or use an earlier checkpoint.")


def _parsed(body: bytes, where: str, form: Any, parse: Callable[[dict[str, Any]], _T]) -> _T:
    try:
        document = json.loads(body, parse_constant=_no_constant)
        check_form(document, form, "the manifest")
        return parse(document)
    except ImpossibleError as error:
        raise CheckpointError(f"{where} says what can't be: {error}. Use an earlier checkpoint.") from None
    except (RecursionError, ValueError) as error:
        raise damaged(where, f"it is no JSON ({error})") from None


def _no_constant(name: str) -> Any:
    raise ImpossibleError(f"it contains {name}")


def _manifest(document: dict[str, Any]) -> Manifest:
    save_id = document["save_id"]
    for name in document["files"]:
        require(f"-{save_id}." in name, f"{name} is of another save than {save_id}")
    files = {name: StoredFile(one["bytes"], one["xxh3_128"]) for name, one in document["files"].items()}
    tensors = {name: parse_tensor(name, one, files) for name, one in document["tensors"].items()}
    texts = {stem: known_file(name, files, ".json") for stem, name in document["texts"].items()}
    _check_files(files, tensors, texts)
    rest = {name: document[name] for name in ("save_id", "step", "epoch", "created", "layout", "about")}
    return Manifest(files=files, tensors=tensors, texts=texts, **rest)


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
        # a header comes before them
        require(total < files[file].num_bytes, f"{file} is smaller than the tensors in it")
    require(len(set(texts.values())) == len(texts), "two documents are in one file")
    for file in texts.values():
        require(files[file].num_bytes <= MAX_BYTES, f"{file} has {files[file].num_bytes} bytes, which is absurd")
    unnamed = files.keys() - {file for file, _ in keys} - set(texts.values())
    require(not unnamed, f"nothing is said to be in {min(unnamed, default='')}")


ITEM_BYTES = {
    "C128": 16,  # not in safetensors: stored as F64, with one dimension more
    "F64": 8, "I64": 8, "U64": 8, "C64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E4M3FNUZ": 1, "F8_E5M2": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""bytes per entry, by the names that safetensors gives dtypes"""
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""the limit of the safetensors library"""


@dataclass(frozen=True)
class HeaderEntry:
    """A tensor in a file. `start` and `stop` count from the file's beginning, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def stored_as(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape under which a file has a tensor: for C128 those of its real and imaginary parts."""
    return ("F64", (*shape, 2)) if dtype == "C128" else (dtype, tuple(shape))


def make_header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]) -> bytes:
    """Returns the first bytes of a file with these tensors (dtype and shape by key), which follow in this order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for key, (dtype, shape) in tensors.items():
        dtype, shape = stored_as(dtype, shape)
        end = offset + ITEM_BYTES[dtype] * math.prod(shape)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that tensors are aligned
    return len(encoded).to_bytes(LENGTH_BYTES, "little") + encoded


def header_length(first: bytes | memoryview, num_bytes: int) -> int:
    """Returns how many bytes of a file of `num_bytes` come before its data, by its first 8 bytes.

    Raises:
        ImpossibleError: the file or the library's limit is shorter.
    """
    length = LENGTH_BYTES + int.from_bytes(first[:LENGTH_BYTES], "little")
    is_possible = len(first) >= LENGTH_BYTES and length <= min(num_bytes, MAX_HEADER_BYTES)
    require(is_possible, f"a header of {length} bytes is announced, and the file has {num_bytes}")
    return length


def read_header(data: bytes | memoryview, num_bytes: int) -> dict[str, HeaderEntry]:
    """Returns the tensors of a file by key, from its bytes up to where the data begins.

    Args:
        data: as long as `header_length` says.
        num_bytes: of the whole file.

    Raises:
        ImpossibleError: it isn't a header, or the tensors don't fill the file from its header to its end.
    """
    try:
        header = json.loads(bytes(data[LENGTH_BYTES:]))
    except (ValueError, RecursionError) as error:
        raise ImpossibleError(f"it is no JSON: {type(error).__name__}") from None
    form = {"dtype": str, "shape": [int], "data_offsets": [int]}
    check_form(header, {}, "it")
    header.pop("__metadata__", None)
    check_form(header, {str: form}, "it")
    entries = {}
    for key, one in header.items():
        start, size = min(one["data_offsets"], default=0), math.prod(one["shape"]) * ITEM_BYTES.get(one["dtype"], -1)
        require(one["data_offsets"] == [start, start + size], f"the tensor {key!r} is impossible")
        entries[key] = HeaderEntry(one["dtype"], tuple(one["shape"]), len(data) + start, len(data) + start + size)
    in_order = sorted((entry.start, entry.stop) for entry in entries.values())
    borders = [(len(data), len(data)), *in_order, (num_bytes, num_bytes)]
    has_gaps = any(before[1] != after[0] for before, after in pairwise(borders))
    require(not has_gaps, "its tensors overlap, or leave gaps")
    return entries


class ImpossibleError(ValueError):
    """A document says what can't be true; the message says what."""


def require(condition: bool, problem: str) -> None:
    """Raise an ImpossibleError unless the condition holds."""
    if not condition:
        raise ImpossibleError(problem)


def check_form(value: Any, form: Any, what: str) -> None:
    """Raise an ImpossibleError unless a value of a JSON document has a form.

    int               a number from 0 on that fits into 64 bits
    str, object       a text, anything
    a pattern         a text that matches it whole
    [form]            a list of values of this form
    {"a": form}       a dictionary with this entry, and maybe others; {"a": (form,)}: the entry may be missing
    {str: form}       a dictionary of such values by texts; or by texts that match a pattern in place of `str`

    Args:
        value: to check.
        form: as above.
        what: the value is, for the message.
    """
    kind = str if isinstance(form, re.Pattern) else form if isinstance(form, type) else type(form)
    fits = isinstance(value, kind) and (kind is not int or (type(value) is int and 0 <= value < 2**63))
    if not fits or (isinstance(form, re.Pattern) and form.fullmatch(value) is None):
        text = repr(value)
        raise ImpossibleError(f"{what} is {text[:60]}{'...' * (len(text) > 60)}")
    if isinstance(form, list):
        for index, one in enumerate(value):
            check_form(one, form[0], f"{what}[{index}]")
    for key, inner in form.items() if isinstance(form, dict) else ():
        if not isinstance(key, str):
            for name, one in value.items():
                check_form(name, key, f"a name in {what}")
                check_form(one, inner, f"{what}[{name!r}]")
        elif not isinstance(inner, tuple) or key in value:
            check_form(value.get(key), inner[0] if isinstance(inner, tuple) else inner, f"{what}[{key!r}]")

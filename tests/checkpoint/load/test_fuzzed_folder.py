"""Whatever the files of a folder say, with right hashes, opening and reading them raises no error but ours."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_128

from lightning_hanayo.dist_checkpointing.compare import folder_content
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.format import MANIFEST
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.state import OptimizerDocument, StateDocument
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.folders import SAVE_ID, document_of, sealed, write_folder

FILE = f"model-00000-{SAVE_ID}.safetensors"
STATE = f"state-{SAVE_ID}.json"
HASH = "0" * 32
NUMBERS = st.integers() | st.sampled_from([0, 1, 2, 3, 2**31, 2**62, 2**63, 10**30])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([FILE, "F32", HASH]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where there are values in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(one for key, child in inner for one in paths(child, (*path, key)))]


def at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def changed(data: st.DataObject, document: Any) -> Any:
    """The document with up to three of its values removed, replaced by any, or by others of its own."""
    for _ in range(data.draw(st.integers(1, 3))):
        everywhere = paths(document)[1:]
        if everywhere:
            *path, last = data.draw(st.sampled_from(everywhere))
            holder = at(document, tuple(path))
            match data.draw(st.sampled_from(["remove", "replace", "copy"])):
                case "remove":
                    del holder[last]
                case "replace":
                    holder[last] = data.draw(VALUES)
                case "copy":
                    holder[last] = deepcopy(at(document, data.draw(st.sampled_from(everywhere))))
    return document


def edited(data: st.DataObject, clean: bytes) -> bytes:
    """The bytes, of which up to 20 in one place are replaced by up to 20 others."""
    start, length = data.draw(st.integers(0, len(clean))), data.draw(st.integers(0, 20))
    return clean[:start] + data.draw(st.binary(max_size=20)) + clean[start + length :]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an optimizer and one callback, of which the state dict and the other values are read, too."""
    path = tmp_path_factory.mktemp("fuzz") / "last.ckpt"
    group = {"lr": 0.1, "betas": (0.9, 0.99), "params": ["a", "b"]}
    state = StateDocument(
        {"loops": {"epoch": 3, "nan": float("nan")}, "callbacks": {"EMA": [torch.ones(2)]}},
        ["a", "b", "c", "tied", "_extra_state"],
        tied={"tied": "a"},
        values={"_extra_state": {"version": 1}},
        optimizers=[OptimizerDocument("torch.optim.Adam", [group], {"a": {"step": 3}}, ["b"])],
    )
    encoded, others = state.encode()
    whole = {"model/a": torch.arange(24.0).view(6, 4), "model/b": torch.tensor(1), "model/c": torch.zeros(0, 2)}
    whole |= {"optimizer/0/a/exp_avg": torch.zeros(6, 4)} | {f"state/{i}": one for i, one in enumerate(others)}
    heads = [Region.of_entries([[0, 2, 4], range(4)]), Region.of_entries([[1, 3, 5], range(4)])]
    write_folder(path, whole, {"model/a": heads}, texts={"state": json.dumps(encoded).encode()})
    assert read_all(path) == "read"
    return path


def read_all(path: Path) -> str:
    """Open, verify and read everything; a refusal is fine."""
    try:
        folder = CheckpointFolder(path)
        folder.verify()
        for name in folder.manifest.tensors:
            folder.read(name)
        for stem in folder.manifest.texts:
            folder.text(stem)
        folder_content(folder)
    except CheckpointError as error:
        assert "\n" not in str(error)
        return "refused"
    return "read"


def fuzz_values(folder: Path, data: st.DataObject) -> None:
    """The manifest's values are changed."""
    (folder / MANIFEST).write_bytes(sealed(changed(data, document_of((folder / MANIFEST).read_bytes()))))
    read_all(folder)


def fuzz_bytes(folder: Path, data: st.DataObject) -> None:
    """The manifest's bytes are edited, without and with the right hash."""
    first, _, body = (folder / MANIFEST).read_bytes().partition(b"\n")
    other = edited(data, body)
    for manifest in (sealed(other), first + b"\n" + other):
        (folder / MANIFEST).write_bytes(manifest)
        read_all(folder)


def fuzz_header(folder: Path, data: st.DataObject) -> None:
    """The header of a file with tensors is changed, and the manifest has the right size and hash of it."""
    clean = (folder / FILE).read_bytes()
    length = 8 + int.from_bytes(clean[:8], "little")
    if data.draw(st.booleans()):
        header = json.dumps(changed(data, json.loads(clean[8:length]))).encode()
    else:
        header = edited(data, clean[8:length])
    header = len(header).to_bytes(8, "little") + header
    (folder / FILE).write_bytes(header + clean[length:])
    document = document_of((folder / MANIFEST).read_bytes())
    size = len(header) + len(clean) - length
    document["files"][FILE] = {"bytes": size, "xxh3_128": xxh3_128(header).hexdigest()}
    (folder / MANIFEST).write_bytes(sealed(document))
    read_all(folder)


def fuzz_document(folder: Path, data: st.DataObject) -> None:
    """The values of the state document are changed, and the manifest has the right size and hash of it."""
    state = json.dumps(changed(data, json.loads((folder / STATE).read_bytes()))).encode()
    (folder / STATE).write_bytes(state)
    document = document_of((folder / MANIFEST).read_bytes())
    document["files"][STATE] = {"bytes": len(state), "xxh3_128": xxh3_128(state).hexdigest()}
    (folder / MANIFEST).write_bytes(sealed(document))
    read_all(folder)


FUZZES = [fuzz_values, fuzz_bytes, fuzz_header, fuzz_document]


def run(fuzz: Callable[[Path, st.DataObject], None], folder: Path, data: st.DataObject) -> None:
    """Fuzz the folder's files, and put them in order afterwards."""
    clean = {file: file.read_bytes() for file in folder.iterdir()}
    try:
        fuzz(folder, data)
    finally:
        for file, content in clean.items():
            file.write_bytes(content)


@pytest.mark.parametrize("fuzz", FUZZES)
@settings(max_examples=40)
@given(data=st.data())
def test_no_error_but_ours_is_raised(
    folder: Path, fuzz: Callable[[Path, st.DataObject], None], data: st.DataObject
) -> None:
    run(fuzz, folder, data)


@pytest.mark.thorough
@pytest.mark.parametrize("fuzz", FUZZES)
@settings(max_examples=1500)
@given(data=st.data())
def test_no_error_but_ours_is_raised_by_many_more(
    folder: Path, fuzz: Callable[[Path, st.DataObject], None], data: st.DataObject
) -> None:
    run(fuzz, folder, data)

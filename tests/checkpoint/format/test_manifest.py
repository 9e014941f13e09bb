"""Whatever a manifest says, either it is a checkpoint's or there is one clear error, before memory is asked for."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from lightning_hanayo.dist_checkpointing.format import Manifest, StoredFile, StoredPart, WholeTensor, save_id_in
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.folders import SAVE_ID, document_of, sealed

FILE = f"model-00000-{SAVE_ID}.safetensors"
HASH = "0" * 32
Document = dict[str, Any]


def manifest(**changes: Any) -> Manifest:
    part = StoredPart(FILE, "model/a", Region.whole((2, 3)), HASH)
    values: Document = {
        "save_id": SAVE_ID,
        "step": 3,
        "epoch": 0,
        "created": "2026-01-01T00:00:00",
        "layout": {"pipe": 2},
        "files": {FILE: StoredFile(100, HASH), f"state-{SAVE_ID}.json": StoredFile(2, HASH)},
        "tensors": {"model/a": WholeTensor((2, 3), "F32", (part,))},
        "texts": {"state": f"state-{SAVE_ID}.json"},
        "about": {"module": "GPT"},
    }
    return Manifest(**values | changes)


def refused(data: bytes) -> str:
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_bytes(data, "last.ckpt/manifest.json")
    assert str(caught.value).startswith("last.ckpt/manifest.json ")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_manifest_comes_back() -> None:
    one = manifest()
    assert Manifest.from_bytes(one.to_bytes(), "here") == one
    assert one.num_bytes == 102


def test_its_save_is_known_without_looking_at_tensors() -> None:
    document = document_of(manifest().to_bytes())
    assert save_id_in(sealed(document | {"tensors": None}), "last.ckpt/manifest.json") == SAVE_ID
    with pytest.raises(CheckpointError, match="says what can't be"):
        save_id_in(sealed(document | {"save_id": "../a"}), "last.ckpt/manifest.json")


def test_it_is_two_lines_of_json() -> None:
    first, body = manifest().to_bytes().decode().splitlines()
    assert first.startswith('{"format": "lightning_hanayo checkpoint", "version": 1, "xxh3_128": "')
    document = json.loads(body)
    assert document["files"][FILE] == {"bytes": 100, "xxh3_128": HASH}
    parts = [{"file": FILE, "xxh3_128": HASH}]
    assert document["tensors"]["model/a"] == {"dtype": "F32", "shape": [2, 3], "parts": parts}


def test_an_older_or_newer_version_says_so() -> None:
    newer = manifest().to_bytes().replace(b'"version": 1', b'"version": 2')
    assert "is of version 2, and this lightning_hanayo reads version 1" in refused(newer)


def test_another_format_says_so() -> None:
    other = manifest().to_bytes().replace(b"lightning_hanayo checkpoint", b"tensorstore")
    assert "its first line isn't that of a checkpoint of HanayoStrategy" in refused(other)


def parts(*documents: Document) -> Callable[[Document], None]:
    """A change of the tensor's parts."""
    full = [{"file": FILE, "xxh3_128": HASH} | one for one in documents]
    return lambda manifest: manifest["tensors"]["model/a"].update(parts=full)


def tensor(**values: Any) -> Callable[[Document], None]:
    return lambda manifest: manifest["tensors"]["model/a"].update(values)


def renamed(name: str) -> Callable[[Document], None]:
    """The name of the file with tensors, wherever it is."""

    def change(manifest: Document) -> None:
        manifest["files"][name] = manifest["files"].pop(FILE)
        manifest["tensors"]["model/a"]["parts"][0]["file"] = name

    return change


def top(**values: Any) -> Callable[[Document], None]:
    return lambda manifest: manifest.update(values)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (renamed(f"../model-00000-{SAVE_ID}.safetensors"), "a name in the manifest['files'] is "),
        (renamed(f"/etc/model-00000-{SAVE_ID}.safetensors"), "a name in the manifest['files'] is "),
        (renamed("s3://bucket/model.safetensors"), "a name in the manifest['files'] is "),
        (renamed("manifest.json"), "a name in the manifest['files'] is "),
        (renamed("model-00000-00c0ffee.safetensors"), f"is of another save than {SAVE_ID}"),
        (parts({"file": "model-00001-5f2c9a1b.safetensors"}), "isn't one of its files"),
        (parts({"file": f"state-{SAVE_ID}.json"}), "isn't one of its files"),
        (parts({"xxh3_128": "abc"}), "['parts'][0]['xxh3_128'] is 'abc'"),
        (parts({"runs": [[[0, 1]], [[0, 3]]]}), "entries are missing from 1 on along dimension 0 of size 2"),
        (parts({"runs": [[[0, 2]], [[0, 2]]]}, {"key": "b", "runs": [[[0, 2]], [[1, 3]]]}), "parts overlap at 1"),
        (parts({"runs": [[[0, 9]], [[0, 3]]]}), "the entries 0 to 9 can't be"),
        (parts({"runs": [[[2, 0]], [[0, 3]]]}), "a run that is no pair of indices"),
        (parts({"runs": [[[0, 2]]]}), "doesn't have 2 dimensions"),
        (parts({}, {}), "two parts overlap"),
        (parts(), "entries are missing from 0 on"),
        (tensor(shape=[2**40, 2**40]), "the shape of model/a is absurd"),
        (tensor(shape=[2**40]), "is smaller than the tensors in it"),
        (tensor(shape=[0, 2**62]), "the shape of model/a is absurd"),
        (tensor(shape=[1] * 40), "has 40 dimensions"),
        (tensor(shape=[-2, -3]), "['model/a']['shape'][0] is -2"),
        (tensor(shape=[True, 6]), "['model/a']['shape'][0] is True"),
        (tensor(shape="ab"), "['model/a']['shape'] is 'ab'"),
        (tensor(dtype="F31"), "has the dtype 'F31', which nobody knows"),
        (tensor(dtype=["F32"]), "['model/a']['dtype'] is ['F32']"),
        (top(tensors={}), f"nothing is said to be in {FILE}"),
        (top(tensors={"a\nb": {"dtype": "F32", "shape": [], "parts": []}}), r"the name 'a\nb' can't be shown"),
        (top(texts={"state": f"state-{SAVE_ID}.json", "b": f"state-{SAVE_ID}.json"}), "two documents are in one file"),
        (
            lambda one: one["files"][f"state-{SAVE_ID}.json"].update(bytes=2**40),
            "has 1099511627776 bytes, which is absurd",
        ),
        (top(save_id="../.."), "the manifest['save_id'] is '../..'"),
        (top(step=-1), "the manifest['step'] is -1"),
        (top(layout=None), "the manifest['layout'] is None"),
    ],
)
def test_what_cant_be_is_refused(change: Callable[[Document], None], problem: str) -> None:
    document = document_of(manifest().to_bytes())
    change(document)
    assert problem in refused(sealed(document))


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{", b"[" * 100_000, b"\xff", b"NaN", b"1" * 10_000, b'{"step": NaN}', b'{"step": 1e400}']
)
def test_what_is_no_document_is_refused(body: bytes) -> None:
    refused(sealed(body))


def test_a_checkpoint_that_could_not_be_read_is_not_written() -> None:
    """Say, because a rank has written no part of a tensor."""
    tensor = manifest().tensors["model/a"]
    half = StoredPart(FILE, "model/a", Region.of_entries([[0], range(3)]), HASH)
    with pytest.raises(CheckpointError, match=r"can't be saved: .* the parts of model/a don't make it up: entries are"):
        manifest(tensors={"model/a": WholeTensor(tensor.shape, tensor.dtype, (half,))}).to_bytes()
    with pytest.raises(CheckpointError, match="it contains NaN"):
        manifest(about={"loss": float("nan")}).to_bytes()

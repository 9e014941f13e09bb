"""A folder of safetensors is read in parts, and what is wrong with it is one clear error."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lightning_hanayo.dist_checkpointing.huggingface import SafetensorsFolder
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.target import Storage
from lightning_hanayo.errors import HanayoError


def save_one(path: Path) -> Path:
    save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, path / "model.safetensors")
    return path


def save_two(path: Path) -> Path:
    """model-1.safetensors: a        model-2.safetensors: b"""
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    for number, (name, value) in enumerate(weights.items()):
        save_file({name: value}, path / f"model-{number}.safetensors")
    index = {"weight_map": {name: f"model-{number}.safetensors" for number, name in enumerate(weights)}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("save", [save_one, save_two])
def test_tensors_are_found_by_name(tmp_path: Path, save: Callable[[Path], Path]) -> None:
    folder = SafetensorsFolder(save(tmp_path))
    assert {name: one.shape for name, one in folder.manifest.tensors.items()} == {"a": (2, 3), "b": (4,)}
    assert [folder.stored(name).dtype for name in "ab"] == [torch.float32, torch.bfloat16]
    assert folder.read("a").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert folder.read("a", Region.of_entries([[1], [0, 2]])).tolist() == [[3, 5]]


def test_only_the_wanted_rows_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({name: torch.zeros(4096, 1024) for name in ("a", "b", "c")}, tmp_path / "model.safetensors")
    folder, read, asked = SafetensorsFolder(tmp_path), Storage.read, []

    def counted(self: Storage, name: str, start: int = 0, stop: int | None = None) -> memoryview:
        data = read(self, name, start, stop)
        asked.append(len(data))
        return data

    monkeypatch.setattr(Storage, "read", counted)
    folder.stored("b").part(Region.of_entries([range(1024, 3072), range(1024)])).read()
    assert asked == [8 * 2**20]


def test_signatures_tell_folders_apart(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.mkdir()
    assert SafetensorsFolder(save_one(first)).signature == SafetensorsFolder(save_one(second)).signature
    save_file({"a": torch.zeros(2, 4)}, second / "model.safetensors")
    assert SafetensorsFolder(first).signature != SafetensorsFolder(second).signature


def truncate(path: Path) -> None:
    file = save_one(path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


def break_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"a text, not tensors")


def lose_a_file(path: Path) -> None:
    (save_two(path) / "model-1.safetensors").unlink()


def lose_a_tensor(path: Path) -> None:
    save_file({"c": torch.ones(1)}, save_two(path) / "model-1.safetensors")


def break_index(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text("{}")


def legacy(path: Path) -> None:
    torch.save({}, path / "pytorch_model.bin")


def adapter(path: Path) -> None:
    (path / "adapter_model.safetensors").touch()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, r"model\.safetensors can't be read: .* download or save it again"),
        (break_header, r"model\.safetensors can't be read"),
        (lose_a_file, r"model-1\.safetensors can't be read"),
        (lose_a_tensor, r"model-1\.safetensors has no tensor b, which model\.safetensors\.index"),
        (break_index, r"model\.safetensors\.index\.json can't be read: 'weight_map'"),
        (legacy, r"has neither model\.safetensors nor .*, but pytorch_model\.bin\..*save_pretrained"),
        (adapter, r"has neither model\.safetensors nor .*, but adapter_model\.safetensors\. Save a model"),
        (Path.rmdir, r"there is no folder .*snapshot_download"),
    ],
)
def test_a_folder_that_cant_be_read_is_one_error(tmp_path: Path, spoil: Callable[[Path], None], message: str) -> None:
    spoil(tmp_path)
    with pytest.raises(HanayoError, match=message):
        SafetensorsFolder(tmp_path)

"""A checkpoint folder gives back what was written, cut in any other way."""

from itertools import product
from pathlib import Path

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import load_file
from torch import Tensor

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.region import Region
from tests.checkpoint.folders import SAVE_ID, part_of, write_folder

TENSORS = {
    "model/fused": torch.arange(24.0).view(6, 4),
    "model/scalar": torch.tensor(3),
    "model/flags": torch.tensor([True, False, True]),
    "model/nothing": torch.zeros(0, 3),
    "model/half": torch.tensor([[1.0, float("nan")], [-0.0, float("inf")]], dtype=torch.bfloat16),
    "model/eight": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    "model/short": torch.tensor([-3, 4], dtype=torch.int16),
    "model/wave": torch.tensor([[1 + 2j], [3 - 4j]], dtype=torch.complex128),
    "model/small wave": torch.tensor([1 + 2j], dtype=torch.complex64),
    "optimizer/0/fused/step": torch.tensor(7.0),
}
HEADS = [Region.of_entries([[0, 2, 4], range(4)]), Region.of_entries([[1, 3, 5], range(4)])]


def equal(a: Tensor, b: Tensor) -> bool:
    """To the last bit, also in tensors with nan."""
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    return bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))


@pytest.fixture(params=["{}/last.ckpt", "memory://{}/last.ckpt"], ids=["local", "remote"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(request.param).format(tmp_path)


def test_all_kinds_of_tensors_come_back(path: str) -> None:
    write_folder(path, TENSORS, {"model/fused": HEADS})
    folder = CheckpointFolder(path)
    folder.verify()
    assert list(folder.manifest.tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert equal(folder.read(name), tensor)


def test_documents_come_back(path: str) -> None:
    write_folder(path, TENSORS, texts={"state": b'{"loops": [1, 2]}', "state-data-00001": b"{}"})
    folder = CheckpointFolder(path)
    assert folder.text("state") == {"loops": [1, 2]}
    assert folder.text("state-data-00001") == {}
    assert (folder.manifest.step, folder.manifest.epoch, folder.manifest.layout) == (10, 1, {"pipe": 2})


def test_a_region_has_its_entries_in_its_order(path: str) -> None:
    write_folder(path, TENSORS, {"model/fused": HEADS})
    rows = CheckpointFolder(path).read("model/fused", Region.of_entries([[5, 1, 2], [3, 0]]))
    assert rows.tolist() == [[23, 20], [7, 4], [11, 8]]


def test_what_the_tensor_doesnt_have_cant_be_read(path: str) -> None:
    write_folder(path, TENSORS)
    with pytest.raises(IndexError, match=r"isn't in a tensor of the shape \(6, 4\)"):
        CheckpointFolder(path).read("model/fused", Region.of_entries([[6], [0]]))


def test_the_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    write_folder(tmp_path, TENSORS)
    stored = load_file(tmp_path / f"model-00000-{SAVE_ID}.safetensors")
    for name, tensor in TENSORS.items():
        if name.startswith("model/") and not tensor.is_complex():
            assert equal(stored[name], tensor)
    assert torch.view_as_complex(stored["model/wave"]).tolist() == TENSORS["model/wave"].tolist()


@pytest.mark.parametrize("listed", ["nothing", "no folder"])
def test_a_remote_list_that_is_late_hides_nothing(listed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder("memory://checkpoints/last.ckpt", TENSORS)
    monkeypatch.setattr(MemoryFileSystem, "ls", lambda *_, **__: [])
    monkeypatch.setattr(MemoryFileSystem, "isdir", lambda *_: listed == "nothing")
    CheckpointFolder("memory://checkpoints/last.ckpt").verify()


def test_long_headers_are_read(path: str) -> None:
    many = {f"model/{'layer' * 20}.{i}": torch.tensor(i) for i in range(500)}
    write_folder(path, many)
    folder = CheckpointFolder(path)
    folder.verify()
    assert all(folder.read(name).item() == i for i, name in enumerate(many))


def test_a_link_to_a_checkpoint_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path / "epoch=1.ckpt", TENSORS)
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "epoch=1.ckpt", target_is_directory=True)
    folder = CheckpointFolder(tmp_path / "last.ckpt")
    folder.verify()
    assert equal(folder.read("model/fused"), TENSORS["model/fused"])


def cube(ways: tuple[int, int, int]) -> list[Region]:
    """The parts of a [12, 8, 4] tensor on a cube that deals out the rows, as of fused heads, columns, and depth."""
    rows = [[i for i in range(12) if i % ways[0] == rank] for rank in range(ways[0])]
    columns = [range(8 * rank // ways[1], 8 * (rank + 1) // ways[1]) for rank in range(ways[1])]
    depth = [range(4 * rank // ways[2], 4 * (rank + 1) // ways[2]) for rank in range(ways[2])]
    return [Region.of_entries(one) for one in product(rows, columns, depth)]


@pytest.mark.parametrize("ways", [(1, 1, 1), (2, 1, 1), (3, 1, 2), (1, 4, 1), (2, 2, 2), (4, 2, 1)])
def test_eight_parts_of_a_cube_are_read_by_any_other(tmp_path: Path, ways: tuple[int, int, int]) -> None:
    whole = torch.arange(12.0 * 8 * 4).view(12, 8, 4)
    write_folder(tmp_path, {"model/a": whole}, {"model/a": cube((2, 2, 2))})
    folder = CheckpointFolder(tmp_path)
    for region in cube(ways):
        assert equal(folder.read("model/a", region), part_of(whole, region))

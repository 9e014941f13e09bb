"""A file that is written one tensor at a time is read by torch as any other, also mapped into memory."""

import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hanayo.dist_checkpointing.export import write_torch_file
from lightning_hanayo.dist_checkpointing.tensor_file import StoredTensor, bytes_of

TENSORS = {
    "matrix": torch.arange(6.0).reshape(2, 3),
    "columns": torch.arange(6.0).reshape(2, 3).T,
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "tiny": torch.ones(3).to(torch.float8_e4m3fn),
    "flags": torch.tensor([True, False]),
    "complex": torch.tensor([1 + 2j]),
}


def written_and_read(value: Any, folder: Path, **options: Any) -> Any:
    with open(folder / "a.ckpt", "wb") as file:
        write_torch_file(file, value)
    return torch.load(folder / "a.ckpt", **options)


@pytest.mark.parametrize("mmap", [False, True], ids=["read", "mapped"])
def test_all_dtypes_come_back(mmap: bool, tmp_path: Path) -> None:
    read = written_and_read(TENSORS, tmp_path, mmap=mmap, weights_only=True)
    assert list(read) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert bytes_of(read[name]) == bytes_of(tensor), name


def test_other_values_and_the_versions_of_a_state_dict_come_back(tmp_path: Path) -> None:
    state = torch.nn.Linear(2, 2).state_dict()
    read = written_and_read({"epoch": 3, "loops": {"a": [1, None]}, "state_dict": state}, tmp_path)
    assert read["loops"] == {"a": [1, None]} and type(read["state_dict"]) is OrderedDict
    assert read["state_dict"]._metadata == state._metadata


def test_tensors_begin_at_multiples_of_64_and_have_checksums(tmp_path: Path) -> None:
    written_and_read(TENSORS, tmp_path)
    with zipfile.ZipFile(tmp_path / "a.ckpt") as archive:
        assert archive.testzip() is None
    reader = torch._C.PyTorchFileReader(str(tmp_path / "a.ckpt"))
    offsets = [reader.get_record_offset(f"data/{number}") for number in range(len(TENSORS))]
    assert [offset % 64 for offset in offsets] == [0] * len(TENSORS)


def test_a_tensor_that_is_there_twice_is_stored_once(tmp_path: Path) -> None:
    shared = torch.ones(1000)
    read = written_and_read([shared, shared], tmp_path)
    assert read[0] is read[1] and (tmp_path / "a.ckpt").stat().st_size < 6000


def test_stored_tensors_are_read_one_after_another(tmp_path: Path) -> None:
    events = []

    def stored(number: int) -> StoredTensor:
        def read(_: object) -> torch.Tensor:
            events.append(number)
            return torch.full((2,), float(number))

        return StoredTensor.of((2,), torch.float32, read)

    read = written_and_read([stored(number) for number in range(3)], tmp_path)
    assert events == [0, 1, 2] and [one[0].item() for one in read] == [0, 1, 2]

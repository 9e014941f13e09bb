"""All ranks verify a checkpoint together: every byte once."""

from pathlib import Path

import pytest
import torch

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder, share
from lightning_hanayo.dist_checkpointing.format import ITEM_BYTES
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.folders import SAVE_ID, write_folder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Tensors of 4 to 400 bytes."""
    write_folder(tmp_path, {f"model/{i}": torch.ones(i) for i in range(1, 101)}, texts={"state": b"{}"})
    return tmp_path


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 300])
def test_each_tensor_and_file_is_one_ranks(path: Path, num_ranks: int) -> None:
    folder = CheckpointFolder(path)
    shares = [share(folder, rank, num_ranks) for rank in range(num_ranks)]
    taken = [(file, key) for one in shares for file, keys in one.items() for key in keys]
    assert sorted(taken) == sorted((file, key) for file, parts in folder.parts.items() for key in parts)
    assert {file for one in shares for file in one} == folder.manifest.files.keys()


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_ranks_take_equal_numbers_of_bytes(path: Path, num_ranks: int) -> None:
    """Up to the longest tensor, or the header."""
    folder = CheckpointFolder(path)
    tensors = folder.manifest.tensors
    num_bytes = [
        sum(tensors[key].num_bytes for keys in share(folder, rank, num_ranks).values() for key in keys)
        for rank in range(num_ranks)
    ]
    header = folder.manifest.num_bytes - sum(num_bytes)
    assert sum(num_bytes) == sum(one.num_bytes for one in tensors.values()) == ITEM_BYTES["F32"] * 5050
    assert max(num_bytes) - min(num_bytes) <= header + 400


def found_by(path: Path, num_ranks: int) -> list[str]:
    """What the ranks raise."""
    found = []
    for rank in range(num_ranks):
        try:
            CheckpointFolder(path).verify(rank, num_ranks)
        except CheckpointError as error:
            found.append(str(error))
    return found


def test_a_whole_checkpoint_is_one_on_all_ranks(path: Path) -> None:
    assert found_by(path, 3) == []


def test_one_rank_finds_what_is_damaged(path: Path) -> None:
    file = path / f"model-00000-{SAVE_ID}.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    (found,) = found_by(path, 4)
    assert f"{file} is damaged: the values of model/" in found

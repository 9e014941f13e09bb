"""All ranks verify a checkpoint together: every byte once, and all raise the same error."""

from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder, share, verify_on_all_ranks
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


def on_all_ranks(path: Path, num_ranks: int) -> list[str | None]:
    """What each rank raises; ranks are threads."""
    said: list[Any] = [None] * num_ranks
    raised: list[str | None] = [None] * num_ranks
    barrier = Barrier(num_ranks, timeout=30)

    def run(rank: int) -> None:
        def gather(value: str | None) -> list[Any]:
            said[rank] = value
            barrier.wait()
            return said

        try:
            verify_on_all_ranks(CheckpointFolder(path), rank, num_ranks, gather)
        except CheckpointError as error:
            raised[rank] = str(error)

    threads = [Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_a_whole_checkpoint_is_one_on_all_ranks(path: Path) -> None:
    assert on_all_ranks(path, 3) == [None, None, None]


def test_all_ranks_raise_what_one_has_found(path: Path) -> None:
    file = path / f"model-00000-{SAVE_ID}.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    data[-4000] ^= 1
    file.write_bytes(data)
    raised = on_all_ranks(path, 4)
    assert len(set(raised)) == 1
    assert f"{file} is damaged: the values of model/" in str(raised[0])

"""A disk without room for a checkpoint: all ranks raise one error, and what was there before is all that is there."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hanayo.dist_checkpointing.commit import SavingRanks, write_files
from lightning_hanayo.dist_checkpointing.plain_file import write_file
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.target import Point, Storage, go_on, target_for
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.save.states import part_of, step_of
from tests.harness.peers import errors_on_ranks, on_ranks

SIZE = 30_000
"""columns: 960 kB for both ranks"""


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1200k", "none", disk]).returncode:
        pytest.skip("this process may not mount a file system")
    yield disk
    subprocess.run(["umount", disk], check=True)


def free_bytes(path: Path) -> int:
    return shutil.disk_usage(path).free


def errors(path: Path, at: Any = None) -> set[str]:
    def save(peers: SavingRanks) -> None:
        Saver(peers, at=at or (lambda point: None)).save(str(path), part_of(peers.rank, 2, size=SIZE))

    return set(errors_on_ranks(2, save, CheckpointError))


def test_a_full_disk_is_found_before_anything_is_written(small_disk: Path) -> None:
    last = small_disk / "last.ckpt"
    on_ranks(2, lambda peers: Saver(peers).save(str(last), part_of(peers.rank, 1)))
    (small_disk / "filler").write_bytes(b"0" * (free_bytes(small_disk) - 500_000))
    before = free_bytes(small_disk)
    for path in (last, small_disk / "other.ckpt"):
        passed: list[Point] = []
        (message,) = errors(path, passed.append)
        assert "was not saved: no space left in" in message
        assert ": 960.0 kB are needed, " in message
        assert message.endswith(" kB were free (rank 0). What was there before is untouched.")
        assert set(passed) == {Point.BEGUN}
        assert free_bytes(small_disk) == before
        assert step_of(str(last)) == 1


def test_a_disk_that_fills_up_while_ranks_write_keeps_the_checkpoint_of_before(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Storage, "free_bytes", lambda _: None)
    last = small_disk / "last.ckpt"
    on_ranks(2, lambda peers: Saver(peers).save(str(last), part_of(peers.rank, 1)))
    (small_disk / "filler").write_bytes(b"0" * (free_bytes(small_disk) - 500_000))
    before = free_bytes(small_disk)
    for path in (last, small_disk / "other.ckpt"):
        (message,) = errors(path)
        assert "no space left in" in message and "kB are needed" in message
        assert step_of(str(last)) == 1
        assert sorted(os.listdir(small_disk)) == ["filler", "last.ckpt"]
        assert free_bytes(small_disk) == before


def test_one_plain_file_on_a_full_disk_keeps_the_one_of_before(small_disk: Path) -> None:
    path = small_disk / "last.ckpt"
    write_file(str(path), lambda file: file.write(b"before"))
    (small_disk / "filler").write_bytes(b"0" * (free_bytes(small_disk) - 100_000))
    with pytest.raises(CheckpointError, match="no space left in .*What was there before is untouched"):
        write_file(str(path), partial(torch.save, {"weight": torch.zeros(200_000)}))
    assert path.read_bytes() == b"before"
    assert sorted(os.listdir(small_disk)) == ["filler", "last.ckpt"]


@contextmanager
def full_after(num_bytes: int, rank: int) -> Iterator[None]:
    """The disk is full once a rank has written so many bytes of tensors. For where no file system may be mounted."""
    create = Storage.create

    class Full:
        def __init__(self, file: Any) -> None:
            self.file, self.left = file, num_bytes

        def write(self, data: Any) -> None:
            self.left -= len(data)
            if self.left < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.file.write(data)

    @contextmanager
    def limited(self: Storage, name: str) -> Iterator[Any]:
        with create(self, name) as file:
            yield Full(file) if name.startswith(f"model-{rank:05d}") else file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "create", limited)
        yield


@pytest.mark.parametrize("rank", [0, 1])
def test_either_rank_may_find_the_disk_full(tmp_path: Path, rank: int) -> None:
    path = tmp_path / "last.ckpt"
    on_ranks(2, lambda peers: Saver(peers).save(str(path), part_of(peers.rank, 1)))
    before = sorted(os.listdir(path))
    with full_after(100_000, rank):
        (message,) = errors(path)
    assert f"no space left in {path}: 960.0 kB are needed" in message and f"(rank {rank})" in message
    assert sorted(os.listdir(path)) == before
    assert step_of(str(path)) == 1


def test_a_rank_that_fails_removes_its_own_files_without_waiting_for_rank_0(tmp_path: Path) -> None:
    target = target_for(str(tmp_path / "last.ckpt"), "5f2c9a1b")
    target.prepare()
    before = target.storage.names()
    with full_after(100_000, rank=1), pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_files(target, 1, part_of(1, 1, size=SIZE), {}, go_on, int)
    assert target.storage.names() == before


@pytest.mark.parametrize("first", ["marker", "manifest"])
def test_the_first_and_the_last_file_may_find_the_disk_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    path = tmp_path / "last.ckpt"
    on_ranks(2, lambda peers: Saver(peers).save(str(path), part_of(peers.rank, 1)))
    before, create = sorted(os.listdir(path)), Storage.create

    def refuse(self: Storage, name: str) -> Any:
        if name.startswith(first):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, name)

    monkeypatch.setattr(Storage, "create", refuse)
    for target in (path, tmp_path / "other.ckpt"):
        (message,) = errors(target)
        assert "no space left in" in message
        assert sorted(os.listdir(tmp_path)) == ["last.ckpt"]
        assert sorted(os.listdir(path)) == before

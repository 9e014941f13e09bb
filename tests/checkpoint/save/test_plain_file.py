"""A checkpoint that is one file: the one of before, or the new one, whatever happens in between."""

import os
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pytest
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

from lightning_hanayo.dist_checkpointing.commit import SavingRanks
from lightning_hanayo.dist_checkpointing.plain_file import write_file
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.target import Point, Storage
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.save.states import part_of, step_of


def content(text: str) -> Any:
    return lambda file: file.write(text.encode())


def test_the_file_of_before_is_there_until_the_new_one_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "checkpoints" / "last.ckpt"
    write_file(str(path), content("first"))

    def write(file: BinaryIO) -> None:
        file.write(b"second")
        file.flush()
        assert path.read_text() == "first"

    write_file(str(path), write)
    assert path.read_text() == "second"
    assert os.listdir(path.parent) == ["last.ckpt"]


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), KeyboardInterrupt(), ValueError("a bug")], ids=repr
)
def test_after_any_error_nothing_is_left_of_the_new_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "last.ckpt"
    write_file(str(path), content("first"))

    def fail(file: BinaryIO) -> None:
        file.write(b"second")
        raise error

    with pytest.raises(CheckpointError if isinstance(error, OSError) else type(error)):
        write_file(str(path), fail)
    assert path.read_text() == "first"
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_what_a_killed_process_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt.tmp-0123abcd").write_text("half")
    (tmp_path / "last.ckpt.tmp-mine").write_text("another's")
    write_file(str(tmp_path / "last.ckpt"), content("whole"))
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "last.ckpt.tmp-mine"]


def test_a_folder_of_several_ranks_is_replaced_by_a_file_and_the_other_way_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "last.ckpt")
    part = part_of(0, 1, num_ranks=1)
    Saver(SavingRanks()).save(path, part)
    replace = Storage.replace

    def refuse(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Storage, "replace", refuse)
    with pytest.raises(CheckpointError, match="Input/output error"):
        write_file(path, content("one file"))
    assert step_of(path) == 1

    monkeypatch.setattr(Storage, "replace", replace)
    write_file(path, content("one file"))
    assert Path(path).read_text() == "one file"
    Saver(SavingRanks()).save(path, part)
    assert step_of(path) == 1
    assert os.listdir(tmp_path) == ["last.ckpt"]


def test_a_folder_of_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").mkdir()
    (tmp_path / "last.ckpt" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="a folder with other files"):
        write_file(str(tmp_path / "last.ckpt"), content("one file"))
    assert [str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*")] == ["last.ckpt", "last.ckpt/notes.txt"]


def test_slurm_checkpoints_are_not_mistaken_for_what_a_killed_save_has_left(tmp_path: Path) -> None:
    """Lightning takes all digits after `hpc_ckpt_` in any name for the number of the latest checkpoint."""
    latest = _CheckpointConnector._CheckpointConnector__max_ckpt_version_in_folder  # type: ignore[attr-defined]

    def look(file: BinaryIO) -> None:
        file.write(b"new")
        assert len(os.listdir(tmp_path)) == 2
        assert latest(str(tmp_path), "hpc_ckpt_") == 2

    write_file(str(tmp_path / "hpc_ckpt_2.ckpt"), content("old"))
    write_file(str(tmp_path / "hpc_ckpt_3.ckpt"), look)
    assert latest(str(tmp_path), "hpc_ckpt_") == 3

    def look_again(point: Point) -> None:
        if point < Point.COMMITTED:
            assert latest(str(tmp_path), "hpc_ckpt_") == 3

    Saver(SavingRanks(), at=look_again).save(str(tmp_path / "hpc_ckpt_4.ckpt"), part_of(0, 1, num_ranks=1))
    assert step_of(str(tmp_path / "hpc_ckpt_4.ckpt")) == 1


def test_a_file_through_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/notes is a file, and no folder. What was there"):
        write_file(str(tmp_path / "notes" / "last.ckpt"), content("x"))


@pytest.mark.parametrize("path", ["memory://last.ckpt", "memory://checkpoints/last.ckpt"])
def test_a_remote_file_is_the_one_of_before_if_the_new_one_fails(path: str) -> None:
    files = fsspec.filesystem("memory")
    write_file(path, content("first"))
    write_file(path, content("second"))

    def fail(file: BinaryIO) -> None:
        file.write(b"third")
        raise OSError(5, "Input/output error")

    with pytest.raises(CheckpointError):
        write_file(path, fail)
    assert files.cat_file(path) == b"second"
    assert files.find("/") == [path.removeprefix("memory:/")]

"""Removal: the manifest first, and nothing that no save has made."""

import os
from pathlib import Path

import fsspec
import pytest

from lightning_hanayo.dist_checkpointing.commit import SavingRanks
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.format import MANIFEST
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.target import Storage, remove_checkpoint
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.save.states import part_of


def save(path: object) -> None:
    Saver(SavingRanks()).save(str(path), part_of(0, 1, num_ranks=1))


def test_a_removal_that_ends_half_way_leaves_no_checkpoint_that_claims_to_be_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.ckpt"
    save(path)
    files = sorted(os.listdir(path))
    for stop_after in range(1, len(files)):
        removed: list[str] = []
        remove = Storage.remove

        def stopped(
            self: Storage, name: str, removed: list[str] = removed, last: int = stop_after, remove: object = remove
        ) -> None:
            if len(removed) == last:
                raise KeyboardInterrupt
            removed.append(name)
            remove(self, name)  # type: ignore[operator]

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Storage, "remove", stopped)
            remove_checkpoint(str(path))
        assert removed[0] == MANIFEST
        with pytest.raises(CheckpointError, match="has no manifest.json"):
            CheckpointFolder(str(path))
        save(path)
    remove_checkpoint(str(path))
    assert os.listdir(tmp_path) == []


def test_what_killed_saves_have_left_next_to_it_goes_too(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    save(path)
    (tmp_path / "last.ckpt.tmp-0123abcd").mkdir()
    (tmp_path / "last.ckpt.old-0123abcd").write_text("before")
    (tmp_path / "last.ckpt.bak").write_text("mine")
    remove_checkpoint(str(path))
    assert os.listdir(tmp_path) == ["last.ckpt.bak"]


def test_a_folder_that_no_save_has_made_is_kept_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    (tmp_path / MANIFEST).write_text('{"name": "a web application"}')
    with pytest.warns(UserWarning, match="is kept"):
        remove_checkpoint(str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == [MANIFEST, "notes"]


def test_what_is_not_there_is_removed_already(tmp_path: Path) -> None:
    remove_checkpoint(str(tmp_path / "last.ckpt"))
    remove_checkpoint(str(tmp_path / "no folder" / "last.ckpt"))
    remove_checkpoint("memory://nowhere/last.ckpt")


def test_a_remote_checkpoint_and_a_file_are_removed(tmp_path: Path) -> None:
    save("memory://checkpoints/last.ckpt")
    remove_checkpoint("memory://checkpoints/last.ckpt")
    assert fsspec.filesystem("memory").find("/checkpoints") == []
    (tmp_path / "last.ckpt").write_text("one process's")
    remove_checkpoint(str(tmp_path / "last.ckpt"))
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_removed_is_told_and_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    save(path)

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Storage, "remove", refuse)
    with pytest.warns(UserWarning, match="can't be removed: .*Permission denied"):
        remove_checkpoint(str(path))

"""Saves of several ranks: what is there afterwards, and what all ranks raise if it can't be done."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hanayo.dist_checkpointing.commit import RankPart, SavingRanks, TensorPart
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.format import MANIFEST
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.target import Point, Storage, go_on
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.save.states import part_of, step_of
from tests.harness.peers import errors_on_ranks, on_ranks


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoints" / "last.ckpt")


@pytest.fixture(params=["local", "remote"])
def any_path(request: pytest.FixtureRequest, path: str) -> str:
    return path if request.param == "local" else "memory://checkpoints/last.ckpt"


def save(path: str, step: int) -> None:
    on_ranks(2, lambda peers: Saver(peers).save(path, part_of(peers.rank, step)))


def error_of(path: str, step: int = 2, ranks: int = 2, part: Any = part_of) -> str:
    """The one error that all ranks raise."""
    messages = errors_on_ranks(ranks, lambda peers: Saver(peers).save(path, part(peers.rank, step)), CheckpointError)
    assert len(set(messages)) == 1
    return messages[0]


def kept(path: str) -> list[str]:
    """What is in the folder of checkpoints."""
    return sorted(os.listdir(os.path.dirname(path)))


def test_a_checkpoint_has_a_file_of_each_rank_and_kind_and_a_manifest(any_path: str) -> None:
    save(any_path, step=3)
    assert step_of(any_path) == 3
    folder = CheckpointFolder(any_path)
    manifest = folder.manifest
    assert manifest.about == {"module": "Model"}
    assert sorted(re.sub(f"-{manifest.save_id}", "", name) for name in folder._storage.names()) == [
        "manifest.json",
        "model-00000.safetensors",
        "model-00001.safetensors",
        "optimizer-00000.safetensors",
        "optimizer-00001.safetensors",
        "state-data-00001.json",
        "state.json",
    ]


def test_it_is_saved_again_and_again_without_leaving_anything_of_before(any_path: str) -> None:
    for step in (1, 2, 3):
        save(any_path, step)
        assert step_of(any_path) == step
    folder = CheckpointFolder(any_path)
    assert set(folder._storage.names()) == {*folder.manifest.files, MANIFEST}


def test_a_remote_file_system_that_gives_back_the_manifest_of_before_loses_no_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    remote = "memory://checkpoints/last.ckpt"
    save(remote, step=1)
    read, before = Storage.read, bytes(Storage(remote).read(MANIFEST))

    def late(self: Storage, name: str, *where: Any) -> memoryview:
        return memoryview(before) if name == MANIFEST else read(self, name, *where)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "read", late)
        save(remote, step=2)
    assert step_of(remote) == 2


def test_all_ranks_pass_all_nine_points_in_order(path: str) -> None:
    def points(peers: SavingRanks) -> list[Point]:
        passed: list[Point] = []
        Saver(peers, at=passed.append).save(path, part_of(peers.rank, 1))
        return passed

    for _ in ("new", "again"):
        assert on_ranks(2, points) == [list(Point)] * 2
    assert len(Point) == 9


def test_a_file_or_a_link_of_that_name_is_replaced(path: str, tmp_path: Path) -> None:
    other = tmp_path / "best.ckpt"
    save(str(other), step=1)
    os.makedirs(os.path.dirname(path))
    for make in (lambda: Path(path).write_bytes(b"of one process"), lambda: os.symlink(other, path)):
        make()
        save(path, step=2)
        assert step_of(path) == 2
        assert kept(path) == ["last.ckpt"]
        on_ranks(2, lambda peers: Saver(peers).remove(path))
    assert step_of(str(other)) == 1, "what the link led to is untouched"


def test_parts_that_do_not_make_up_the_whole_are_not_saved(path: str) -> None:
    def half(rank: int, step: int) -> RankPart:
        return part_of(rank, step, num_ranks=3)

    save(path, step=1)
    message = error_of(path, part=half)
    assert "the ranks' parts of model/weight (6, 64), F32, do not make up the whole" in message
    assert step_of(path) == 1


def test_a_tensor_that_cannot_be_stored_is_named_on_all_ranks(path: str) -> None:
    def sparse(rank: int, step: int) -> RankPart:
        if rank == 0:
            return part_of(rank, step)
        values = torch.zeros(2, 2).to_sparse()
        return RankPart([TensorPart("model/mask", values, (2, 2), Region.whole((2, 2)), "model")])

    message = error_of(path, part=sparse)
    assert message.startswith(f"{path} (step 2) was not saved: The tensor model/mask")
    assert "(rank 1)" in message
    assert kept(path) == []


def test_a_document_that_is_no_json_is_refused(path: str) -> None:
    def infinite(rank: int, step: int) -> RankPart:
        return RankPart((), {"state": {"loss": float("inf")}})

    assert "ValueError: Out of range float" in error_of(path, part=infinite, ranks=1)
    assert not os.path.lexists(path)


def test_a_path_through_a_file_is_one_error_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    message = error_of(str(tmp_path / "notes" / "last.ckpt"))
    assert message.endswith("What was there before is untouched.")
    assert f"{tmp_path / 'notes'} is a file, and no folder (rank 0)" in message


def test_a_folder_of_other_files_is_refused(path: str) -> None:
    os.makedirs(path)
    (Path(path) / "notes").write_text("mine")
    assert "is a folder with other files than a checkpoint's" in error_of(path)
    assert os.listdir(path) == ["notes"]


@pytest.mark.parametrize("before", [0, 1], ids=["nothing", "a checkpoint"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: os.truncate(path, 9)], ids=["removed", "truncated"])
def test_what_another_run_removes_meanwhile_is_no_part_of_a_checkpoint(path: str, before: int, damage: Any) -> None:
    """Two runs with the same folder take each other's files for what killed saves have left."""
    if before:
        save(path, step=before)

    def interfere(point: Point) -> None:
        if point == Point.GATHERED:
            written = Path(path).parent.glob("last.ckpt*/optimizer-00001-*")
            damage(max(written, key=lambda file: file.stat().st_mtime_ns))

    def disturbed(peers: SavingRanks) -> None:
        Saver(peers, at=interfere if peers.rank == 0 else go_on).save(path, part_of(peers.rank, 2))

    messages = errors_on_ranks(2, disturbed, CheckpointError)
    assert len(set(messages)) == 1
    assert re.search("optimizer-00001-.* has .*Does another run save to this path", messages[0])
    assert kept(path) == ["last.ckpt"] * before
    assert not before or step_of(path) == before


def test_files_of_others_in_a_checkpoint_stay(path: str) -> None:
    save(path, step=1)
    (Path(path) / "notes").write_text("mine")
    save(path, step=2)
    assert step_of(path) == 2
    with pytest.warns(UserWarning, match="is kept: files that no save has written are in it, such as notes"):
        Saver(SavingRanks()).remove(path)
    assert os.listdir(path) == ["notes"]


def test_ranks_that_see_another_folder_are_told_before_anything_is_written(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Storage.read

    def not_shared(self: Storage, name: str, *where: Any) -> memoryview:
        if name.startswith("marker"):
            raise FileNotFoundError(name)
        return read(self, name, *where)

    monkeypatch.setattr(Storage, "read", not_shared)
    passed: list[Point] = []
    (message, _) = errors_on_ranks(
        2, lambda peers: Saver(peers, at=passed.append).save(path, part_of(peers.rank, 1)), CheckpointError
    )
    assert "All ranks must see the same folder: save to a file system that all nodes share" in message
    assert set(passed) == {Point.BEGUN}
    assert kept(path) == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES], ids=["read-only", "no permission"])
def test_a_folder_that_cannot_be_written_is_one_error(path: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(Storage, "make_folder", refuse)
    assert f"{path} can't be written: {os.strerror(number)} (rank 0)" in error_of(path)

"""Local and remote folders do the same, but for what only a local one can do."""

import errno
import os
from pathlib import Path

import pytest

from lightning_hanayo.dist_checkpointing.target import CHUNK, Storage


@pytest.fixture(params=["{}/a.ckpt", "memory:/{}/a.ckpt"], ids=["local", "remote"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage(str(request.param).format(tmp_path))


def put(storage: Storage, name: str, data: bytes) -> None:
    with storage.create(name) as file:
        file.write(data)


def test_paths_say_where_a_folder_is(tmp_path: Path) -> None:
    assert Storage(tmp_path).is_local
    assert Storage("C:\\checkpoints").is_local
    assert Storage("/tmp/a::b.ckpt").path == "/tmp/a::b.ckpt"
    assert not Storage("memory://a").is_local
    local = Storage(f"file://{tmp_path}/a.ckpt")
    assert local.is_local
    assert local.path == f"{tmp_path}/a.ckpt"
    assert Storage("~/a.ckpt").path == str(Path.home() / "a.ckpt")


def test_files_are_written_listed_read_and_removed(storage: Storage) -> None:
    assert not storage.is_folder()
    assert storage.sizes(["a"]) == {}
    storage.make_folder()
    put(storage, "b", b"0123456789")
    put(storage, "a", b"")
    assert storage.is_folder()
    assert not storage.is_file()
    assert storage.names() == ["a", "b"]
    assert storage.sizes(["a", "b", "c"]) == {"a": 0, "b": 10}
    assert bytes(storage.read("b")) == b"0123456789"
    assert bytes(storage.read("b", 2, 5)) == b"234"
    assert bytes(storage.read("a")) == b""
    storage.remove("a")
    storage.remove("a")
    assert storage.names() == ["b"]
    storage.remove_folder()
    assert not storage.is_folder()


def test_a_file_takes_anothers_place(storage: Storage) -> None:
    storage.make_folder()
    put(storage, "manifest.json", b"old")
    put(storage, "manifest.json.tmp", b"new")
    storage.replace("manifest.json.tmp", "manifest.json")
    assert bytes(storage.read("manifest.json")) == b"new"
    assert storage.names() == ["manifest.json"]


def test_a_local_file_is_on_the_device_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    put(Storage(str(tmp_path)), "a", b"0123")
    assert synced == [4]


def test_long_ranges_come_in_pieces(storage: Storage) -> None:
    storage.make_folder()
    data = bytes(range(256)) * (CHUNK // 128)
    put(storage, "a", data)
    pieces = [bytes(piece) for piece in storage.chunks("a", 5, len(data) - 3)]
    assert b"".join(pieces) == data[5:-3]
    assert max(map(len, pieces)) <= CHUNK
    assert list(storage.chunks("a", 4, 4)) == []


def test_every_failure_is_an_os_error(storage: Storage) -> None:
    storage.make_folder()
    put(storage, "a", b"0123")
    with pytest.raises(OSError, match="No such file|nothing"):
        storage.read("nothing")
    with pytest.raises(OSError, match="ends at byte 4, before 9"):
        storage.read("a", 1, 9)
    with pytest.raises(OSError, match="ends at byte 4, before 9"):
        list(storage.chunks("a", 1, 9))


def test_a_folder_is_renamed_at_once(tmp_path: Path) -> None:
    storage = Storage(str(tmp_path / "a.ckpt.tmp-1"))
    storage.make_folder()
    put(storage, "a", b"1")
    storage.rename(str(tmp_path / "a.ckpt"))
    assert (tmp_path / "a.ckpt" / "a").read_bytes() == b"1"
    storage = Storage(str(tmp_path / "a.ckpt"))
    assert storage.names() == ["a"]
    assert (storage.free_bytes() or 0) > 0


def test_a_file_system_that_does_not_sync_folders_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", refuse)
    error = errno.EINVAL
    Storage(str(tmp_path)).sync()
    error = errno.EIO
    with pytest.raises(OSError, match="Input/output error"):
        Storage(str(tmp_path)).sync()

"""What a run remembers of its checkpoints, and which of them is the newest."""

import os
from pathlib import Path

import torch

from lightning_hanayo.strategy.restarts import Record, absolute, record_path


def file_of(folder: Path, name: str, step: int, saved: float) -> str:
    path = folder / name
    torch.save({"epoch": 0, "global_step": step}, path)
    os.utime(path, (saved, saved))
    return str(path)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = record_path(tmp_path, "torchrun-none")
    record = Record(7.0, ["agent"], {"0": ["a.ckpt"]})
    record.write(path)
    assert path == f"{tmp_path}/.hanayo/torchrun-none.json"
    assert Record.read(path) == record


def test_a_record_that_is_cut_or_missing_counts_as_none(tmp_path: Path) -> None:
    path = record_path(tmp_path, "key")
    assert Record.read(path) is None
    for text in ('{"started": 7.0', '{"begun": 7.0}', "[]"):
        (tmp_path / ".hanayo").mkdir(exist_ok=True)
        Path(path).write_text(text)
        assert Record.read(path) is None


def test_the_newest_file_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    paths = [file_of(tmp_path, *one) for one in (("a", 4, 30.0), ("b", 6, 10.0), ("c", 6, 20.0), ("d", 2, 40.0))]
    whole, broken = Record(5.0, [], {"0": paths}).checkpoints_of(0)
    assert [Path(one.path).name for one in whole] == ["d", "a", "c", "b"]
    assert broken == []


def test_checkpoints_of_another_run_or_of_another_fit_do_not_count(tmp_path: Path) -> None:
    older, own = file_of(tmp_path, "last.ckpt", 90, 3.0), file_of(tmp_path, "own.ckpt", 2, 8.0)
    record = Record(5.0, [], {"0": [older], "1": [own, str(tmp_path / "removed.ckpt")]})
    assert record.checkpoints_of(0) == ([], [])
    assert [one.path for one in record.checkpoints_of(1)[0]] == [own]
    assert record.checkpoints_of(2) == ([], [])


def test_a_checkpoint_that_is_not_whole_is_named(tmp_path: Path) -> None:
    (tmp_path / "cut.ckpt").write_bytes(b"PK")
    whole, broken = Record(0.0, [], {"0": [str(tmp_path / "cut.ckpt")]}).checkpoints_of(0)
    assert not whole
    assert [Path(one.path).name for one in broken] == ["cut.ckpt"]


def test_local_paths_are_remembered_from_the_root_on() -> None:
    assert absolute("last.ckpt") == os.path.abspath("last.ckpt")
    assert absolute("memory://runs/last.ckpt") == "memory://runs/last.ckpt"

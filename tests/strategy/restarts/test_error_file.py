"""What torchrun's agent reads of a rank that has failed."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_hanayo.errors import PeerFailed
from lightning_hanayo.strategy.restarts import write_error_file


def report(folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> str:
    """What torchrun prints."""
    path = str(folder / "error.json")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
    try:
        raise error
    except BaseException as caught:
        write_error_file(caught)
    return str(ChildFailedError("train.py", {1: ProcessFailure(1, 17, 1, path)}))


def test_torchrun_shows_the_error_and_where_it_was_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = report(tmp_path, monkeypatch, RuntimeError("the loss exploded"))
    assert "RuntimeError: the loss exploded" in text
    assert f"in {report.__name__}" in text


def test_a_rank_that_ends_because_of_another_one_names_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "PeerFailed: rank 3: ValueError: no more data" in report(
        tmp_path, monkeypatch, PeerFailed("rank 3: ValueError: no more data")
    )


def test_nothing_is_written_where_there_is_no_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/dev/null", str(tmp_path / "removed" / "error.json")):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", path)
        write_error_file(RuntimeError("fault"))
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    write_error_file(RuntimeError("fault"))
    assert list(tmp_path.iterdir()) == []
    assert not Path("/dev/null").is_file()

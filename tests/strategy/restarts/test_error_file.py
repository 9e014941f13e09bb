"""What torchrun's agent reads of a rank that has failed."""

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_hanayo.errors import HanayoError, PeerFailed
from lightning_hanayo.strategy.restarts import write_error_file


def report(folder: Path, error: BaseException) -> str:
    """What torchrun prints."""
    path = str(folder / "error.json")
    write_error_file(error, {"TORCHELASTIC_ERROR_FILE": path})
    return str(ChildFailedError("train.py", {1: ProcessFailure(1, 17, 1, path)}))


def test_torchrun_shows_the_error_and_where_it_was_raised(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        raise RuntimeError("the loss exploded")
    text = report(tmp_path, caught.value)
    assert "RuntimeError: the loss exploded" in text
    assert f"in {test_torchrun_shows_the_error_and_where_it_was_raised.__name__}" in text


def test_a_mistake_is_shown_in_one_line(tmp_path: Path) -> None:
    assert "traceback : HanayoError: num_waves=0: expected 1\n" in report(
        tmp_path, HanayoError("num_waves=0: expected 1")
    )


def test_a_rank_that_ends_because_of_another_one_names_its_cause(tmp_path: Path) -> None:
    text = report(tmp_path, PeerFailed("rank 3: ValueError: no more data"))
    assert "another rank failed first: rank 3: ValueError: no more data" in text


def test_nothing_is_written_where_there_is_no_agent(tmp_path: Path) -> None:
    for path in ("/dev/null", str(tmp_path / "removed" / "error.json")):
        write_error_file(RuntimeError("fault"), {"TORCHELASTIC_ERROR_FILE": path})
    write_error_file(RuntimeError("fault"), {})
    assert list(tmp_path.iterdir()) == []
    assert not Path("/dev/null").is_file()

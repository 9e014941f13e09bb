"""Schedules as values and as CSV files."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Schedule, build, with_loss_stage
from tests.schedule.samples import make, schedules


def written(path: Path, text: str) -> Path:
    file = path / "mine.csv"
    file.write_text(text)
    return file


def test_properties() -> None:
    schedule = with_loss_stage(make("interleaved", 2, 4, 3))
    assert (schedule.num_ranks, schedule.num_stages) == (2, 7)
    assert schedule.stages_of(0) == (0, 2, 4, 6)
    assert [schedule.share_of(stage) for stage in (0, 1, 6)] == [1 / 3, 1 / 3, 0]
    assert hash(schedule) == hash(with_loss_stage(make("interleaved", 2, 4, 3)))


@given(schedules())
@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_csv_and_back(tmp_path: Path, schedule: Schedule) -> None:
    for communication in (False, True):
        schedule.to_csv(tmp_path / "again.csv", communication=communication)
        again = Schedule.from_csv(tmp_path / "again.csv")
        assert again.name == "again"
        assert (again.actions, again.stage_ranks) == (schedule.actions, schedule.stage_ranks)
        assert again.num_microbatches == schedule.num_microbatches


def test_the_file_itself(tmp_path: Path) -> None:
    build("1f1b", num_ranks=2, num_microbatches=1).to_csv(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text().splitlines() == ["0F0,0B0", "1F0,1B0"]


def test_empty_cells_are_idle(tmp_path: Path) -> None:
    schedule = Schedule.from_csv(written(tmp_path, "0F0,,,0B0\n,1F0, 1B0 ,\n"))
    assert schedule.actions == build("1f1b", num_ranks=2, num_microbatches=1).actions


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0F0,0X0\n", r"mine\.csv, row 1, cell 2: '0X0' is no action"),
        ("", "holds no action"),
        (",,\n", "holds no action"),
        ("0F0,0B0\n2F0,2B0\n", "stages up to 2 but no action of stage 1"),
        ("0F0,0B0\n1F0\n", "stage 1 has no whole backward"),
        ("0F0,0B0\n0F1,0B1\n", "both claim stage 0"),
        ("0F0,0B0\n\n", "rank 1 holds no stage"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(HanayoError, match=why):
        Schedule.from_csv(written(tmp_path, text))


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(HanayoError, match="can't be read"):
        Schedule.from_csv(tmp_path / "none.csv")
    with pytest.raises(HanayoError, match="can't be read"):
        Schedule.from_csv(tmp_path)

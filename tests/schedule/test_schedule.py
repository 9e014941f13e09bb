"""Schedules as values, and as CSV files."""

import pickle
import re
import tracemalloc
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Schedule, build, forward_only, with_loss_stage
from lightning_hanayo.schedule.table import Table
from tests.schedule.samples import make, row, schedules


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


def test_a_schedule_stays_a_schedule() -> None:
    schedule = make("hanayo", 2, 4)
    copies = (pickle.loads(pickle.dumps(schedule)), replace(schedule), deepcopy(schedule), forward_only(schedule))
    assert all(type(one) is Schedule for one in copies)
    assert copies[:3] == (schedule,) * 3 and copies[3] != schedule
    assert type(with_loss_stage(make("1f1b", 2, 2))) is Schedule and isinstance(schedule, Table)


@given(schedules())
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        ("0F0,0B0\n1F0;1B0\n", r"mine\.csv, row 2, cell 1: '1F0;1B0' is no action"),
        ("0F0," + 5000 * "9" + "F0\n", r"row 1, cell 2: '9+\.\.\.9+F0' is no action"),
        ("", "holds no action"),
        (",,\n", "holds no action"),
        ("0F0,0B0\n2F0,2B0\n", "stages up to 2 but no action of stage 1"),
        ("0F0,0B0\n99999999999F0\n", "stages up to 99999999999 but no action of stage 1"),
        ("0F0,0B0,0F99999999999\n", "no forward of micro-batch 1"),
        ("0F0,0B0\n1F0\n", r"mine\.csv, row 2, cell 1: .* rank 1, position 0: stage 1 has no whole(.|\n)*\[1F0\]"),
        ("0F0,0B0\n0F1,0B1\n", r"rank 1, position 0: ranks 0 and 1 both claim stage 0(.|\n)*\[0F1\]"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B0,1B1\n", r"wait for each other(.|\n)*\[0B0\]"),
        ("0F0,0B0\n\n", "rank 1 holds no stage"),
    ],
)
def test_a_bad_file_is_rejected(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(HanayoError, match=why) as error:
        Schedule.from_csv(written(tmp_path, text))
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    ("count", "cell", "why"), [(13_000_000, "10F1000,", "more than 64 MiB"), (1_100_000, ",", "1,100,000 cells")]
)
def test_a_huge_file_is_rejected_before_it_is_parsed(tmp_path: Path, count: int, cell: str, why: str) -> None:
    file = written(tmp_path, count * cell)
    tracemalloc.start()
    try:
        with pytest.raises(HanayoError, match=why):
            Schedule.from_csv(file)
        assert tracemalloc.get_traced_memory()[1] < 80 << 20
    finally:
        tracemalloc.stop()


def test_a_binary_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(bytes(range(256)))
    with pytest.raises(HanayoError, match="it is no text, see byte 128"):
        Schedule.from_csv(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes(b"\0\1\2")
    with pytest.raises(HanayoError, match=r"row 1, cell 1: '\\x00"):
        Schedule.from_csv(tmp_path / "a.csv")


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(HanayoError, match="can't be read"):
        Schedule.from_csv(tmp_path / "none.csv")
    with pytest.raises(HanayoError, match="can't be read"):
        Schedule.from_csv(tmp_path)


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=1)
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none" / "a.csv", "No such file")):
        with pytest.raises(HanayoError, match=f"can't be written: {why}"):
            schedule.to_csv(path)


def test_torchs_other_cells_are_dropped_or_split(tmp_path: Path) -> None:
    """It gathers and frees sharded parameters, and may let a forward and a backward overlap."""
    text = "0UNSHARD,0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2,0RESHARD,0REDUCE_GRAD"
    schedule = Schedule.from_csv(written(tmp_path, text))
    assert schedule.actions == (row("0F0 0F1 0F2 0B0 0B1 0B2"),)
    assert schedule.pairs == {row("0F2 0B0")}


PAIRED = {
    "(0F1;0B0)OVERLAP_F_B": "0F0,(0F1;0B0)OVERLAP_F_B,0B1",
    "(0F1;0I0)OVERLAP_F_B": "0F0,(0F1;0I0)OVERLAP_F_B,0W0,0B1",
    "(0F0;0F1)OVERLAP_F_F": "(0F0;0F1)OVERLAP_F_F,(0B0;0B1)OVERLAP_B_B",
    "(0I0;0I1)OVERLAP_I_I": "0F0,0F1,(0I0;0I1)OVERLAP_I_I,0W0,0W1",
}


@pytest.mark.parametrize("text", PAIRED.values(), ids=PAIRED)
def test_pairs_are_written_as_they_were_read(tmp_path: Path, text: str) -> None:
    schedule = Schedule.from_csv(written(tmp_path, text))
    assert len(schedule.pairs) == text.count("OVERLAP")
    schedule.to_csv(tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text().strip() == text


NO_PAIRS = {
    "0F0,(0B0;0F1)OVERLAP_B_F,0B1": "F comes before B and I, and B before I, as in 0F1, 0B0",
    "0F0,0F1,(0I0;0B1)OVERLAP_I_B,0W0": "F comes before B and I, and B before I, as in 0B1, 0I0",
    "0F0,(0F1;0F1)OVERLAP_F_F,0B0,0B1": "0F1 appears twice",
    "(0F0;0B0)OVERLAP_F_B,0F1,0B1": "they are of one micro-batch",
    "0F0,0I0,(0F1;0W0)OVERLAP_F_B,0B1": "a weight gradient (W) runs alone",
    "0F0,(0F1)OVERLAP_F_B,0B0,0B1": "is no action",
    "0F0,(0F1;0B0;0B1)OVERLAP_F_B": "is no action",
    "(0F0;0F1)OVERLAP_F_F,(1B0;0B1)OVERLAP_B_B,0B0\n1F0,1F1,1B1": "both claim stage 1",
}


@pytest.mark.parametrize("text", NO_PAIRS)
def test_what_is_no_pair_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(HanayoError, match=re.escape(NO_PAIRS[text])):
        Schedule.from_csv(written(tmp_path, text))


def test_a_pair_that_waits_for_itself_over_another_rank_is_refused(tmp_path: Path) -> None:
    """0B1 waits for 1B1, that for 1F1, and that for 0F1, which runs at once with 0B0: fine; but 0F1+0B1 can't be."""
    text = "0F0,(0F2;0B0)OVERLAP_F_B,0F1,0B1,0B2\n1F0,1F2,1B2,1B0,1F1,1B1"
    with pytest.raises(HanayoError, match="wait for each other and can never run"):
        Schedule.from_csv(written(tmp_path, text))

"""Schedules drawn as text."""

from lightning_hanayo.schedule import Timeline, build, schedule_text, timeline_text
from lightning_hanayo.schedule.grid import grid
from tests.schedule.samples import make


def test_over_time() -> None:
    assert schedule_text(build("1f1b", num_ranks=2, num_microbatches=2)).splitlines() == [
        "rank 0  F0 F1 ......B0    ...B1",
        "rank 1  ...F0 B0    F1 B1    ......",
    ]


def test_the_wave() -> None:
    drawn = schedule_text(make("hanayo", 4, 4)).splitlines()
    assert drawn[0].startswith("rank 0  F0 F1 F2 F3 .........F0 B0    F1 B1")
    assert drawn[3].startswith("rank 3  .........F0 F0 F1 F1 F2 F2 F3 F3 .........B0    B0")


def test_few_columns() -> None:
    drawn = schedule_text(make("hanayo", 4, 32, 2), columns=80).splitlines()
    assert len(drawn) == 4
    assert max(map(len, drawn)) <= 80


def test_nothing() -> None:
    assert timeline_text(Timeline(())) == ""


def test_a_table_with_a_mark() -> None:
    assert grid(build("1f1b", num_ranks=2, num_microbatches=1).actions, mark=(1, 0)).splitlines() == [
        "rank 0  0F0   0B0",
        "rank 1 [1F0]  1B0",
    ]

"""Errors about a table: the drawing with a mark."""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule import Schedule, build
from lightning_hanayo.schedule.passes.validation import reject, table_text
from tests.schedule.samples import row


def test_the_drawing() -> None:
    assert table_text(build("1f1b", num_ranks=2, num_microbatches=1).actions, mark=(1, 0)).splitlines() == [
        "rank 0  0F0   0B0",
        "rank 1 [1F0]  1B0",
    ]


def test_only_the_cells_around_the_mark_are_drawn() -> None:
    """Six before it and six after it; of many ranks, six above it and six below it."""
    rows = [row(" ".join(f"{rank}F{m}" for m in range(20))) for rank in range(40)]
    lines = table_text(rows, mark=(10, 10)).splitlines()
    assert [line.split()[1] for line in lines] == [str(rank) for rank in range(4, 17)]
    assert lines[6].startswith("rank 10 ... 10F4") and "[10F10]" in lines[6] and lines[6].endswith("10F16 ...")


def test_the_error_has_the_cell() -> None:
    with pytest.raises(HanayoError, match="schedule 'mine', rank 0, position 1: it is wrong") as caught:
        reject(Schedule("mine", (0,), (row("0F0 0B0"),), 1), (0, 1), "it is wrong")
    assert caught.value.cell == (0, 1)

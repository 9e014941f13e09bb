"""The image of a comparison shows all schedules, and those that were left out."""

from pathlib import Path

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting import save_ranking
from lightning_hanayo.schedule.comparison import compare


def test_image_shows_each_schedule_with_its_numbers_and_those_left_out(tmp_path: Path) -> None:
    names = ["gpipe", "1f1b", "hanayo", "zbv"]
    comparison = compare(num_ranks=4, num_microbatches=8, num_waves=2, activation_budget=4, names=names)
    save_ranking(tmp_path / "all.svg", comparison, title="P = 4", unit="ms")
    picture = (tmp_path / "all.svg").read_text()
    for text in (
        "P = 4",
        "hanayo: makespan 27 ms, bubble 11.1%; 4 M_a, 24 messages",
        "gpipe: makespan 33 ms, bubble 27.3%; 8 M_a, over the budget, 6 messages",
        "time [ms]",
        "zbv is left out: 'zbv' has two",
    ):
        assert f"<!-- {text}" in picture
    order = [picture.index(f"<!-- {name}:") for name in ("hanayo", "1f1b", "gpipe")]
    assert order == sorted(order), "the fastest on top"


def test_only_image_formats_are_written(tmp_path: Path) -> None:
    comparison = compare(num_ranks=2, num_microbatches=2, names=["gpipe"])
    save_ranking(tmp_path / "all.png", comparison, title="P = 2")
    assert (tmp_path / "all.png").stat().st_size > 5000
    with pytest.raises(HanayoError, match="must be one of png, svg, pdf"):
        save_ranking(tmp_path / "all.html", comparison, title="P = 2")

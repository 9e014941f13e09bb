"""Pictures: that they come about, show what they should, and touch nothing global."""

import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting import draw_timeline, save_comparison, save_schedule
from lightning_hanayo.plotting.rows import legend
from lightning_hanayo.schedule import CostModel, Timeline, build, simulate, with_loss_stage


def wave(num_ranks: int, num_microbatches: int, message: float = 0.0) -> Timeline:
    schedule = build("hanayo", num_ranks=num_ranks, num_microbatches=num_microbatches, num_waves=2)
    return simulate(schedule, CostModel(message=message))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_comparison_is_a_file(tmp_path: Path, suffix: str) -> None:
    save_comparison(tmp_path / f"wave.{suffix}", wave(2, 4, 0.1), wave(2, 4), title="a step")
    assert (tmp_path / f"wave.{suffix}").stat().st_size > 5000


def test_a_comparison_shows_both_with_their_figures(tmp_path: Path) -> None:
    save_comparison(tmp_path / "wave.svg", wave(2, 2, 0.1), wave(2, 2), title="a step")
    picture = (tmp_path / "wave.svg").read_text()
    for text in ("a step", "measured: makespan 7.8 s, bubble 23.1%", "predicted: makespan 7 s, bubble 14.3%"):
        assert f"<!-- {text} -->" in picture


def test_one_schedule(tmp_path: Path) -> None:
    schedule = with_loss_stage(build("interleaved", num_ranks=3, num_microbatches=3))
    save_schedule(tmp_path / "table.svg", schedule, CostModel(gradient_reduce=1.0))
    picture = (tmp_path / "table.svg").read_text()
    for text in ("interleaved, 3 ranks, 3 micro-batches", "rank 2", "gradient reduction"):
        assert text in picture


def test_rows_lie_from_rank_0_down_and_numbers_stand_in_their_boxes() -> None:
    axes = Figure(figsize=(8, 3)).subplots()
    timeline = wave(2, 2)
    draw_timeline(timeline, axes, title="here")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.yaxis_inverted()
    placed = {(*map(float, text.get_position()), text.get_text()) for text in axes.texts}
    middles = {((s.start + s.end) / 2, float(s.rank), str(s.action.microbatch)) for s in timeline.spans}
    assert placed == middles


def test_numbers_that_do_not_fit_are_left_out() -> None:
    axes = Figure(figsize=(2, 1)).subplots()
    draw_timeline(wave(4, 16), axes)
    assert len(axes.texts) < 100


def test_the_legend_tells_the_legs_of_a_wave() -> None:
    assert list(legend([wave(2, 2)])) == [
        "forward, leg 0, 2",
        "forward, leg 1, 3",
        "backward, leg 2, 0",
        "backward, leg 3, 1",
    ]
    assert list(legend([simulate(build("1f1b", num_ranks=2, num_microbatches=2))])) == ["forward", "backward"]


def test_the_loss_has_a_colour_of_its_own() -> None:
    schedule = with_loss_stage(build("gpipe", num_ranks=2, num_microbatches=2))
    timeline = simulate(schedule, CostModel(forward=(1.0, 1.0, 0.3)))
    assert list(legend([timeline])) == ["forward", "head and loss", "backward"]


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HanayoError, match=r"must be one of png, svg, pdf"):
        save_schedule(tmp_path / "table.gif", build("1f1b", num_ranks=2, num_microbatches=2))


def test_an_empty_timeline_is_a_picture_too(tmp_path: Path) -> None:
    save_comparison(tmp_path / "wave.png", Timeline(()), wave(2, 2))
    assert (tmp_path / "wave.png").exists()


def test_no_window_system_and_no_pyplot(tmp_path: Path) -> None:
    code = (
        "import sys; from lightning_hanayo.schedule import build; from lightning_hanayo.plotting import save_schedule;"
        f"save_schedule({str(tmp_path / 'a.png')!r}, build('1f1b', num_ranks=2, num_microbatches=2));"
        "print([m for m in ('torch', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Images of timelines are written, show what they should, and leave matplotlib's global state alone."""

import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from matplotlib import image as matplotlib_image
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting import save_comparison, save_timeline
from lightning_hanayo.plotting.palette import legend_entries
from lightning_hanayo.plotting.timeline import _bands, _words, draw_actions
from lightning_hanayo.schedule import Action, CostModel, Span, Timeline, build, simulate, with_loss_stage


def wave(num_ranks: int, num_microbatches: int, message: float = 0.0) -> Timeline:
    schedule = build("hanayo", num_ranks=num_ranks, num_microbatches=num_microbatches, num_waves=2)
    return simulate(schedule, CostModel(message=message))


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_comparison_is_written(tmp_path: Path, suffix: str) -> None:
    save_comparison(tmp_path / f"wave.{suffix}", wave(2, 4, 0.1), wave(2, 4), title="a step")
    assert (tmp_path / f"wave.{suffix}").stat().st_size > 5000


def test_a_comparison_shows_both_timelines_with_makespan_and_bubble(tmp_path: Path) -> None:
    save_comparison(tmp_path / "wave.svg", wave(2, 2, 0.1), wave(2, 2), title="a step")
    picture = (tmp_path / "wave.svg").read_text()
    for text in ("a step", "measured: makespan 7.8 s, bubble 23.1%", "simulated: makespan 7 s, bubble 14.3%"):
        assert f"<!-- {text}" in picture


def drawn(timeline: Timeline, size: tuple[float, float] = (8.0, 3.0), follow: Sequence[int] = ()) -> Axes:
    """Axes with the whole timeline."""
    axes = Figure(figsize=size).subplots()
    draw_actions(timeline, axes, window=(0.0, timeline.makespan), follow=follow)
    return axes


def numbers(axes: Axes) -> list[tuple[float, float, str]]:
    """The micro-batch numbers that are drawn: x, y, text."""
    return [
        (float(x), float(y), str(collection.get_label()))
        for collection in axes.collections
        if isinstance(collection, PathCollection)
        for x, y in collection.get_offsets()
    ]


def test_rank_0_is_on_top_and_numbers_are_in_the_middle_of_their_boxes() -> None:
    timeline = wave(2, 2)
    axes = drawn(timeline)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1"]
    assert axes.yaxis_inverted()
    middles = [((s.start + s.end) / 2, float(s.rank), str(s.action.microbatch)) for s in timeline.spans]
    assert sorted(numbers(axes)) == sorted(middles)


def test_a_window_shows_the_actions_that_overlap_it() -> None:
    axes = Figure(figsize=(8, 3)).subplots()
    timeline = wave(2, 2)
    draw_actions(timeline, axes, window=(2.0, 4.0))
    assert axes.get_xlim() == (2.0, 4.0)
    middles = [(s.start + s.end) / 2 for s in timeline.spans]
    assert len(numbers(axes)) == sum(2 <= middle <= 4 for middle in middles)


def test_numbers_that_do_not_fit_are_left_out() -> None:
    assert len(numbers(drawn(wave(4, 16), size=(2, 1)))) < 100


def test_one_micro_batch_can_be_followed_over_the_ranks() -> None:
    (path,) = drawn(wave(2, 2), follow=[1]).lines
    forward, backward = [0, 1, 1, 0] * 2, [0, 1, 1, 0] * 2
    assert list(path.get_ydata()) == forward + backward


def test_a_pair_of_actions_has_two_lanes() -> None:
    """rank 0   |3 |   |      the upper half of the row is 0.215 above its middle
    |1     |
    """
    pair = Span(0, Action.parse("0F3"), 0.0, 2.0), Span(0, Action.parse("1B1"), 0.0, 3.0)
    axes = drawn(Timeline(pair), follow=[1])
    assert numbers(axes) == [(1.0, pytest.approx(-0.215), "3"), (1.5, pytest.approx(0.215), "1")]
    boxes = [path.get_extents() for boxes in axes.collections[:2] for path in boxes.get_paths()]
    assert [(box.x0, box.x1) for box in boxes] == [(0.0, 2.0), (0.0, 3.0)]
    assert [tuple(map(float, line.get_ydata())) for line in axes.lines] == [(pytest.approx(0.215),)]


def test_each_step_has_its_own_path() -> None:
    timeline = simulate(build("gpipe", num_ranks=2, num_microbatches=2), steps=3)
    assert len(drawn(timeline, follow=[0]).lines) == 3


def test_a_long_timeline_is_broken_into_bands_without_gaps() -> None:
    timeline = wave(8, 32)
    bands = _bands([timeline], 20.0, 3.6)
    assert len(bands) > 1
    assert bands[0][0] == 0
    assert bands[-1][1] == pytest.approx(timeline.makespan)
    assert all(before[1] == after[0] for before, after in pairwise(bands))


def test_bands_do_not_exceed_the_maximum_height() -> None:
    assert len(_bands([wave(16, 64)], 20.0, 6.0)) * 16 * 0.34 <= 40


def test_a_short_timeline_is_one_band() -> None:
    assert len(_bands([wave(4, 4)], 20.0, 2.0)) == 1


def test_an_image_in_bands_has_title_axis_and_ranks(tmp_path: Path) -> None:
    save_timeline(tmp_path / "wave.svg", wave(8, 32), title="here", unit="T_F", follow=[0, 31])
    picture = (tmp_path / "wave.svg").read_text()
    for text in ("here: makespan 103 T_F, bubble 6.8%", "time [T_F]", "rank 7"):
        assert text in picture


def test_legend_names_the_legs_of_a_wave() -> None:
    assert list(legend_entries([wave(2, 2)])) == [
        "forward, legs 0, 2",
        "forward, legs 1, 3",
        "backward, legs 0, 2",
        "backward, legs 1, 3",
    ]
    one_leg = simulate(build("1f1b", num_ranks=2, num_microbatches=2))
    together = legend_entries([one_leg, wave(2, 2), simulate(build("zbv", num_ranks=2, num_microbatches=2))])
    assert len(together) == len(set(together.values())) == 8, "one entry for each colour"
    assert list(legend_entries([one_leg])) == ["forward", "backward"]


def test_the_loss_has_its_own_colour() -> None:
    schedule = with_loss_stage(build("gpipe", num_ranks=2, num_microbatches=2))
    timeline = simulate(schedule, CostModel(forward=(1.0, 1.0, 0.3)))
    assert list(legend_entries([timeline])) == ["forward", "head and loss", "backward"]


@pytest.mark.thorough
def test_a_comparison_is_as_wide_as_a_page_and_as_high_as_its_bands_need(tmp_path: Path) -> None:
    shapes = {}
    for ranks, microbatches in ((2, 4), (4, 16)):
        path = tmp_path / f"{ranks}.png"
        save_comparison(path, wave(ranks, microbatches, 0.1), wave(ranks, microbatches), title="a step", planned=0.04)
        shapes[ranks] = matplotlib_image.imread(path).shape
    assert shapes[2][1] == shapes[4][1] == 1600
    assert shapes[4][0] > 3 * shapes[2][0]


def test_a_comparison_says_what_its_bubbles_are(tmp_path: Path) -> None:
    words = _words(wave(2, 4, 0.1), wave(2, 4), 0.04, "s")
    assert [line.partition(":")[0] for line in words] == ["measured", "simulated", "planned", "bubble"]
    assert "4.0%" in words[2] and len(_words(wave(2, 4), wave(2, 4), None, "s")) == 3


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HanayoError, match=r"must be one of png, svg, pdf"):
        save_timeline(tmp_path / "table.gif", wave(2, 2))


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HanayoError, match=r"nowhere/a.png can't be written: No such file or directory"):
        save_timeline(tmp_path / "nowhere" / "a.png", wave(2, 2))


def test_an_empty_timeline_can_be_drawn(tmp_path: Path) -> None:
    save_comparison(tmp_path / "wave.png", Timeline(()), wave(2, 2))
    assert (tmp_path / "wave.png").exists()


def test_drawing_imports_neither_torch_nor_pyplot(tmp_path: Path) -> None:
    code = (
        "import sys; from lightning_hanayo.schedule import build, simulate;"
        "from lightning_hanayo.plotting import save_timeline;"
        f"save_timeline({str(tmp_path / 'a.png')!r}, simulate(build('1f1b', num_ranks=2, num_microbatches=2)));"
        "print([m for m in ('torch', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

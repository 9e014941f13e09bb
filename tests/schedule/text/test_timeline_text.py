"""Schedules drawn as text."""

from lightning_hanayo.schedule import Action, CostModel, Schedule, Span, Timeline, build, simulate, timeline_text
from lightning_hanayo.schedule.text import MAX_COLUMNS, timeline_lines
from tests.schedule.samples import make


def schedule_text(schedule: Schedule, columns: int | None = None) -> str:
    return timeline_text(simulate(schedule), columns)


def test_over_time() -> None:
    assert schedule_text(build("1f1b", num_ranks=2, num_microbatches=2)).splitlines() == [
        "rank 0  F0 F1 ......B0    ...B1",
        "rank 1  ...F0 B0    F1 B1    ......",
    ]


def test_the_wave() -> None:
    drawn = schedule_text(make("hanayo", 4, 4)).splitlines()
    assert drawn[0].startswith("rank 0  F0 F1 F2 F3 .........F0 B0    F1 B1")
    assert drawn[3].startswith("rank 3  .........F0 F0 F1 F1 F2 F2 F3 F3 .........B0    B0")


def test_no_spans_give_empty_text() -> None:
    assert timeline_text(Timeline(())) == ""


def test_a_long_schedule_wraps_into_bands() -> None:
    schedule = make("hanayo", 4, 8, 2)
    whole = schedule_text(schedule).splitlines()
    bands = schedule_text(schedule, columns=60).split("\n\n")
    assert len(bands) > 2
    assert all(len(line) <= 60 for band in bands for line in band.splitlines())
    for rank, line in enumerate(whole):
        joined = "".join(band.splitlines()[rank].ljust(60)[8:] for band in bands)
        assert joined.rstrip() == line[8:].rstrip()


def test_pieces_belong_to_their_spans() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2))
    first, second = timeline_lines(timeline)
    assert first.head == "rank 0  "
    assert [(text, str(span.action) if span else None) for text, span in second.pieces] == [
        ("...", None),
        ("F0 ", "1F0"),
        ("B0    ", "1B0"),
        ("F1 ", "1F1"),
        ("B1    ", "1B1"),
        ("......", None),
    ]


def test_a_pair_of_actions_shares_a_cell() -> None:
    """0F3 and 2B1 start together; then 0F4 is alone, until 2B2 joins it."""
    cells = ("0F3", 0, 1), ("2B1", 0, 2), ("0F4", 2, 4), ("2B2", 3, 5)
    pairs = Timeline(tuple(Span(0, Action.parse(cell), start, end) for cell, start, end in cells))
    assert timeline_text(pairs) == "rank 0  F3|B1 F4 F4|B2"
    (line,) = timeline_lines(pairs)
    assert [(text, str(span and span.action)) for text, span in line.pieces] == [
        ("F3", "0F3"),
        ("|B1 ", "2B1"),
        ("F4 F4", "0F4"),
        ("|B2 ", "2B2"),
    ]


def test_spans_that_touch_have_cells_of_their_own() -> None:
    """Measured: the second one starts a little before the first one's end."""
    touching = Span(0, Action.parse("0F0"), 0.0, 1.01), Span(0, Action.parse("0F1"), 1.0, 2.0)
    assert timeline_text(Timeline(touching)) == "rank 0  F0 F1"


def test_a_tiny_action_keeps_lines_short() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=2), CostModel(forward=1e-9))
    assert max(map(len, timeline_text(timeline).splitlines())) < 60


def test_a_long_schedule_keeps_lines_short() -> None:
    timeline = simulate(build("1f1b", num_ranks=2, num_microbatches=3000))
    assert max(map(len, timeline_text(timeline).splitlines())) <= MAX_COLUMNS + 10

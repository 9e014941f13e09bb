"""Spans that a rank has at once share its row.

rank 0 |0F3 |    |0F4 |
       |1B1      |    |
       0    1    2    3
"""

from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.plotting.timeline import WHOLE, box_heights, span_lanes
from lightning_hanayo.schedule import Action, Span, build, simulate
from tests.schedule.samples import unhurried


def span(cell: str, start: float, end: float, rank: int = 0) -> Span:
    return Span(rank, Action.parse(cell), start, end)


FORWARD, BACKWARD, AFTER = PAIR = span("0F3", 0, 1), span("1B1", 0, 2), span("0F4", 2, 3)


def test_a_pair_shares_the_row() -> None:
    assert box_heights(PAIR) == {FORWARD: (0, 0.5), BACKWARD: (0.5, 1), AFTER: (0, 1)}


def test_measured_spans_overlap_anywhere() -> None:
    """The second one begins in the middle of the first one, and ends after it."""
    one, other = span("0F3", 0, 2), span("1B1", 1, 3)
    assert box_heights([one, other]) == {one: (0, 0.5), other: (0.5, 1)}


def test_spans_of_other_ranks_need_no_room() -> None:
    assert set(span_lanes([span("0F3", 0, 1), span("1F2", 0, 1, rank=1)]).values()) == {0}


def test_without_pairs_all_boxes_are_whole() -> None:
    timeline = simulate(build("hanayo", num_ranks=4, num_microbatches=8, num_waves=2))
    assert set(box_heights(timeline.spans).values()) == {WHOLE}


@unhurried
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=12))
def test_boxes_never_cover_each_other(times: list[tuple[int, int]]) -> None:
    spans = [span(f"0F{number}", start, start + length) for number, (start, length) in enumerate(times)]
    heights = box_heights(spans)
    for number, one in enumerate(spans):
        for other in spans[:number]:
            if one.start < other.end and other.start < one.end:
                (top, bottom), (other_top, other_bottom) = heights[one], heights[other]
                assert bottom <= other_top or other_bottom <= top

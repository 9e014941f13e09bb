"""A rank's row has two lanes while the rank has two spans at once.

rank 0 |0F3 |    |0F4 |
       |1B1      |    |
       0    1    2    3
"""

from hypothesis import given
from hypothesis import strategies as st

from lightning_hanayo.plotting.timeline import Part, main_part, outline, span_lanes, span_parts
from lightning_hanayo.schedule import Action, Span, build, simulate
from tests.schedule.samples import unhurried


def span(cell: str, start: float, end: float, rank: int = 0) -> Span:
    return Span(rank, Action.parse(cell), start, end)


FORWARD, BACKWARD, AFTER = PAIR = span("0F3", 0, 1), span("1B1", 0, 2), span("0F4", 2, 3)


def test_a_pair_shares_the_row_while_both_run() -> None:
    assert span_parts(PAIR) == {
        FORWARD: (Part(0, 1, 0, 0.5),),
        BACKWARD: (Part(0, 1, 0.5, 1), Part(1, 2, 0, 1)),
        AFTER: (Part(2, 3, 0, 1),),
    }


def test_the_outline_of_a_box_with_two_heights() -> None:
    corners = [(0, 0.5), (1, 0.5), (1, 0), (2, 0), (2, 1), (1, 1), (1, 1), (0, 1)]
    assert outline(span_parts(PAIR)[BACKWARD]) == corners


def test_numbers_are_in_the_longest_part() -> None:
    parts = span_parts([span("0F3", 0, 1.5), span("1B1", 0, 2)])
    assert [main_part(own).middle for own in parts.values()] == [(0.75, 0.25), (0.75, 0.75)]


def test_measured_spans_overlap_anywhere() -> None:
    """The second one begins in the middle of the first one, and ends after it."""
    one, other = span("0F3", 0, 2), span("1B1", 1, 3)
    assert span_parts([one, other]) == {
        one: (Part(0, 1, 0, 1), Part(1, 2, 0, 0.5)),
        other: (Part(1, 2, 0.5, 1), Part(2, 3, 0, 1)),
    }


def test_spans_of_other_ranks_need_no_room() -> None:
    assert set(span_lanes([span("0F3", 0, 1), span("1F2", 0, 1, rank=1)]).values()) == {0}


def test_without_pairs_all_boxes_are_whole() -> None:
    timeline = simulate(build("hanayo", num_ranks=4, num_microbatches=8, num_waves=2))
    for own, parts in span_parts(timeline.spans).items():
        assert parts == (Part(own.start, own.end, 0, 1),)


@unhurried
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=12))
def test_boxes_cover_their_spans_and_never_each_other(times: list[tuple[int, int]]) -> None:
    spans = [span(f"0F{number}", start, start + length) for number, (start, length) in enumerate(times)]
    boxes = span_parts(spans)
    assert boxes.keys() == set(spans)
    for own, parts in boxes.items():
        assert [own.start, *(part.end for part in parts)] == [*(part.start for part in parts), own.end]
    parts = [part for own in boxes.values() for part in own]
    for number, one in enumerate(parts):
        for other in parts[:number]:
            in_time = one.start < other.end and other.start < one.end
            assert not (in_time and one.top < other.bottom and other.top < one.bottom)

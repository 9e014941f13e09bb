"""Shares a rank's row among spans that overlap in time: the row has two lanes while the rank has two spans at once.

0F3 from 0 to 1, 2B1 from 0 to 2         rank 0 |0F3 |    |
                                                |2B1      |        2B1 has the lower half, then the whole row
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from lightning_hanayo.schedule import Span


class Part(NamedTuple):
    """A rectangle of a span's box: from `start` to `end`, and from `top` to `bottom`.

    Heights are fractions of the row, counted from its top.
    """

    start: float
    end: float
    top: float
    bottom: float

    @property
    def is_whole(self) -> bool:
        """Whether it has the whole height of the row."""
        return self[2:] == (0.0, 1.0)

    @property
    def middle(self) -> tuple[float, float]:
        """Time and height."""
        return (self.start + self.end) / 2, (self.top + self.bottom) / 2


Parts = tuple[Part, ...]
"""of one span, in order of time"""


def span_parts(spans: Iterable[Span]) -> dict[Span, Parts]:
    """The box of each span; all must take time. A span that is alone on its rank has one part, of the whole height."""
    rows: dict[int, list[Span]] = {}
    for span in spans:
        rows.setdefault(span.rank, []).append(span)
    return {span: parts for row in rows.values() for span, parts in _row_parts(row).items()}


def span_lanes(spans: Iterable[Span]) -> dict[Span, int]:
    """For each span a lane, from 0 on, in which it overlaps with no other span of its rank: the first one free."""
    lanes: dict[Span, int] = {}
    ends: dict[int, list[float]] = {}
    for span in sorted(spans, key=lambda span: span.start):
        own = ends.setdefault(span.rank, [])
        lane = next((lane for lane, end in enumerate(own) if end <= span.start), len(own))
        own[lane : lane + 1] = [span.end]
        lanes[span] = lane
    return lanes


def main_part(parts: Parts) -> Part:
    """The longest part, in which a span's number is written."""
    return max(parts, key=lambda part: part.end - part.start)


def outline(parts: Parts) -> list[tuple[float, float]]:
    """The corners of a span's box, as (time, height), clockwise from the upper left one."""
    above = [(time, part.top) for part in parts for time in (part.start, part.end)]
    below = [(time, part.bottom) for part in parts for time in (part.start, part.end)]
    return above + below[::-1]


def _row_parts(row: Sequence[Span]) -> dict[Span, Parts]:
    """The boxes on one rank."""
    lanes, coming = span_lanes(row), sorted(row, key=lambda span: span.start, reverse=True)
    found: dict[Span, list[Part]] = {span: [] for span in row}
    running: list[Span] = []
    for start, end in pairwise(sorted({time for span in row for time in (span.start, span.end)})):
        running = [span for span in running if span.end > start]
        while coming and coming[-1].start == start:
            running.append(coming.pop())
        num_lanes = 1 + max((lanes[span] for span in running), default=0) if len(running) > 1 else 1
        for span in running:
            lane = lanes[span] if num_lanes > 1 else 0
            _extend(found[span], Part(start, end, lane / num_lanes, (lane + 1) / num_lanes))
    return {span: tuple(parts) for span, parts in found.items()}


def _extend(parts: list[Part], part: Part) -> None:
    """Append `part`, or lengthen the last one if it has the same height."""
    if parts and parts[-1][2:] == part[2:]:
        part = parts.pop()._replace(end=part.end)
    parts.append(part)

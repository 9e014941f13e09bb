"""Draws a schedule or timeline as text, a row per rank: as a string, or in pieces that a caller may colour."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, islice, repeat, zip_longest
from operator import attrgetter, itemgetter
from typing import NamedTuple

from lightning_hanayo.schedule.simulate import Span, Timeline

MAX_COLUMNS = 20_000
"""characters in a row that isn't wrapped; labels are cut short to fit"""
SHORT = 0.05
"""in parts of the longest action: shorter actions don't widen the drawing to fit their labels"""


def timeline_text(timeline: Timeline, columns: int | None = None) -> str:
    """The timeline, a row per rank: kind and micro-batch at each action's start, dots where the rank is idle.

    Actions that a rank runs at once share a cell: `F3|B1`.

    Args:
        timeline: simulated or measured.
        columns: cuts the drawing into bands of at most so many characters, with an empty line between them.

    Example:
        >>> print(timeline_text(simulate(build("1f1b", num_ranks=2, num_microbatches=2))))
        rank 0  F0 F1 ......B0    ...B1
        rank 1  ...F0 B0    F1 B1    ......
    """
    return "\n".join(map(str, timeline_lines(timeline, columns)))


@dataclass(frozen=True, slots=True)
class Line:
    """One rank's row, or part of it. Without pieces: the empty line between two bands."""

    head: str
    pieces: tuple[tuple[str, Span | None], ...] = ()
    """runs of characters, each with its span; idle time has none"""

    def __str__(self) -> str:
        return (self.head + "".join(text for text, _ in self.pieces)).rstrip()


def timeline_lines(timeline: Timeline, columns: int | None = None) -> Iterator[Line]:
    """The lines of `timeline_text`, in pieces."""
    compute = [span for span in timeline.spans if span.action.kind.is_compute and span.end > span.start]
    if not compute:
        return
    margin = len(f"rank {timeline.num_ranks - 1}") + 2
    rows: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in sorted(compute, key=attrgetter("start")):
        rows[span.rank].append(span)
    cells = [list(_cells(row)) for row in rows]
    longest = max(len(cell.labels) for row in cells for cell in row)
    too_short = SHORT * max(span.end - span.start for span in compute)
    whole = [cell for row in cells for cell in row if cell.end - cell.start >= too_short]
    # characters per unit of time with which all labels fit, but those of very short cells
    scale = max(((len(cell.labels) + 1) / (cell.end - cell.start) for cell in whole), default=1 / too_short)
    scale = min(scale, MAX_COLUMNS / timeline.makespan)
    width = max(1, round(timeline.makespan * scale))
    band = width if columns is None else max(longest + 1, columns - margin)
    for start in range(0, width, band):
        if start:
            yield Line("")
        columns_here = range(start, min(width, start + band))
        for rank, own in enumerate(cells):
            runs = groupby(_row(own, timeline.begin, scale, columns_here), key=itemgetter(1))
            pieces = tuple(("".join(character for character, _ in run), span) for span, run in runs)
            yield Line(f"rank {rank}".ljust(margin), pieces)


class _Cell(NamedTuple):
    """The time from one start to the next one, or to the end, with the spans that a rank has at its start."""

    start: float
    end: float
    labels: list[tuple[str, Span]]
    """the characters of kind and micro-batch of each span, such as "F3|B1", with their spans"""
    longest: Span
    """the span that ends last, to which the rest of the cell belongs"""


def _cells(spans: Sequence[Span]) -> Iterator[_Cell]:
    """One rank's cells. Its spans are in order of their starts.

    0F3 from 0 to 1, 2B1 from 0 to 2, 0F4 from 2 to 3         |F3|B1   |F4 |
    """
    running: list[Span] = []
    for span, following in zip_longest(spans, spans[1:]):
        length = span.end - span.start
        # spans at once share a tenth of the shorter one: measured spans may touch by a little
        shared = [(other, min(other.end, span.end) - span.start) for other in running]
        running = [other for other, one in shared if one > 0.1 * min(other.end - other.start, length)] + [span]
        end = max(other.end for other in running)
        if following is not None:
            end = min(end, following.start)
        if end > span.start:
            labels = [(text, one) for one in running for text in f"|{one.action.kind}{one.action.microbatch}"][1:]
            yield _Cell(span.start, end, labels, max(running, key=attrgetter("end")))


_Character = tuple[str, Span | None]


def _row(cells: Sequence[_Cell], begin: float, scale: float, columns: range) -> list[_Character]:
    """These columns of a rank's row, whose cells are in order."""
    row: list[_Character] = [(".", None)] * len(columns)
    ended = bisect_right(cells, columns.start, key=lambda cell: round((cell.end - begin) * scale))
    for cell in islice(cells, ended, None):
        first, last = (round((time - begin) * scale) for time in (cell.start, cell.end))
        if first >= columns.stop:
            break
        text = list(islice(chain(cell.labels, repeat((" ", cell.longest))), last - first))
        for column in range(max(first, columns.start), min(last, columns.stop)):
            row[column - columns.start] = text[column - first]
    return row

"""Draws a schedule or timeline as text, a row per rank: as a string, or in pieces that a caller may colour."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, repeat, zip_longest
from operator import attrgetter, itemgetter

from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.simulate import Span, Timeline, simulate
from lightning_hanayo.schedule.table import Table

MAX_COLUMNS = 20_000
"""characters in a row that isn't wrapped; labels are cut short to fit"""
SHORT = 0.05
"""in parts of the longest action: shorter actions don't widen the drawing to fit their labels"""


def schedule_text(
    schedule: Table, costs: CostModel | None = None, columns: int | None = None, wrap: bool = False
) -> str:
    """The schedule, simulated under `costs`, over time, a row per rank.

    Example:
        >>> print(schedule_text(build("1f1b", num_ranks=2, num_microbatches=2)))
        rank 0  F0 F1 ......B0    ...B1
        rank 1  ...F0 B0    F1 B1    ......
    """
    return timeline_text(simulate(schedule, costs), columns, wrap)


def timeline_text(timeline: Timeline, columns: int | None = None, wrap: bool = False) -> str:
    """The timeline, a row per rank: kind and micro-batch at each action's start, dots where the rank is idle.

    Actions that a rank runs at once share a cell: `F3|B1`.

    Args:
        timeline: simulated or measured.
        columns: the most characters per row; None: enough for every label. With too few, labels are cut short.
        wrap: instead, cut the drawing into bands of at most `columns` characters, with an empty line between them.
    """
    return "\n".join(map(str, timeline_lines(timeline, columns, wrap)))


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of characters that belongs to one span, or to idle time (None)."""

    text: str
    span: Span | None


@dataclass(frozen=True, slots=True)
class Line:
    """One rank's row, or part of it. Without pieces: the empty line between two bands."""

    head: str
    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        return (self.head + "".join(piece.text for piece in self.pieces)).rstrip()


def timeline_lines(timeline: Timeline, columns: int | None = None, wrap: bool = False) -> Iterator[Line]:
    """The lines of `timeline_text`, in pieces."""
    compute = [span for span in timeline.spans if span.action.kind.is_compute and span.end > span.start]
    if not compute:
        return
    margin = len(f"rank {timeline.num_ranks - 1}") + 2
    rows: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in sorted(compute, key=attrgetter("start")):
        rows[span.rank].append(span)
    cells = [list(_cells(row)) for row in rows]
    longest = max(cell.size for row in cells for cell in row)
    too_short = SHORT * max(span.end - span.start for span in compute)
    whole = [cell for row in cells for cell in row if cell.end - cell.start >= too_short]
    # characters per unit of time with which all labels fit, but those of very short cells
    scale = max(((cell.size + 1) / (cell.end - cell.start) for cell in whole), default=1 / too_short)
    scale = min(scale, MAX_COLUMNS / timeline.makespan)
    if columns is not None and not wrap:
        scale = min(scale, max(1, columns - margin) / timeline.makespan)
    width = max(1, round(timeline.makespan * scale))
    band = width if columns is None or not wrap else max(longest + 1, columns - margin)
    for start in range(0, width, band):
        if start:
            yield Line("", ())
        columns_here = range(start, min(width, start + band))
        for rank, own in enumerate(cells):
            runs = groupby(_row(own, timeline.begin, scale, columns_here), key=itemgetter(1))
            pieces = tuple(Piece("".join(character for character, _ in run), span) for span, run in runs)
            yield Line(f"rank {rank}".ljust(margin), pieces)


@dataclass(frozen=True, slots=True)
class _Cell:
    """The time from one start to the next one, or to the end, with the spans that a rank has at its start."""

    start: float
    end: float
    spans: tuple[Span, ...]

    @property
    def labels(self) -> Iterator[str]:
        """Kind and micro-batch of each span: "F3", "|B1"."""
        for number, span in enumerate(self.spans):
            yield f"{'|' * (number > 0)}{span.action.kind}{span.action.microbatch}"

    @property
    def size(self) -> int:
        """The characters of all labels."""
        return sum(map(len, self.labels))

    @property
    def characters(self) -> Iterator[tuple[str, Span]]:
        """The labels with the span of each character, then spaces, which belong to the span that ends last."""
        for span, label in zip(self.spans, self.labels, strict=True):
            yield from zip(label, repeat(span), strict=False)
        yield from repeat((" ", max(self.spans, key=attrgetter("end"))))


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
            yield _Cell(span.start, end, tuple(running))


_Character = tuple[str, Span | None]


def _row(cells: Sequence[_Cell], begin: float, scale: float, columns: range) -> list[_Character]:
    """These columns of a rank's row, whose cells are in order."""
    row: list[_Character] = [(".", None)] * len(columns)
    ended = bisect_right(cells, columns.start, key=lambda cell: round((cell.end - begin) * scale))
    for cell in islice(cells, ended, None):
        first, last = (round((time - begin) * scale) for time in (cell.start, cell.end))
        if first >= columns.stop:
            break
        text = list(islice(cell.characters, last - first))
        for column in range(max(first, columns.start), min(last, columns.stop)):
            row[column - columns.start] = text[column - first]
    return row

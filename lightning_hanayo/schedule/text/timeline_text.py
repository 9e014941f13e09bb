"""Draws a schedule or timeline as text, a row per rank: as a string, or in pieces that a caller may colour."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter, itemgetter

from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.simulation.simulate import simulate
from lightning_hanayo.schedule.simulation.timeline import Span, Timeline
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

    Args:
        timeline: simulated or measured.
        columns: the most characters per row; None: enough for every label. With too few, labels are cut short.
        wrap: instead, cut the drawing into bands of at most `columns` characters, with an empty line between them.
    """
    lines = timeline_lines(timeline, columns, wrap)
    return "\n".join((line.head + "".join(piece.text for piece in line.pieces)).rstrip() for line in lines)


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


def timeline_lines(timeline: Timeline, columns: int | None = None, wrap: bool = False) -> Iterator[Line]:
    """The lines of `timeline_text`, in pieces."""
    compute = [span for span in timeline.spans if span.action.kind.is_compute and span.end > span.start]
    if not compute:
        return
    margin = len(f"rank {timeline.num_ranks - 1}") + 2
    longest = max(len(_label(span)) for span in compute)
    lengths = [span.end - span.start for span in compute]
    too_short = SHORT * max(lengths)
    shortest = min(length for length in lengths if length >= too_short)  # its label should fit
    scale = min((longest + 1) / shortest, MAX_COLUMNS / timeline.makespan)
    if columns is not None and not wrap:
        scale = min(scale, max(1, columns - margin) / timeline.makespan)
    width = max(1, round(timeline.makespan * scale))
    band = width if columns is None or not wrap else max(longest + 1, columns - margin)
    spans: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in sorted(compute, key=attrgetter("start")):
        spans[span.rank].append(span)
    for start in range(0, width, band):
        if start:
            yield Line("", ())
        columns_here = range(start, min(width, start + band))
        for rank, own in enumerate(spans):
            yield Line(f"rank {rank}".ljust(margin), tuple(_pieces(_row(own, timeline.begin, scale, columns_here))))


_Cell = tuple[str, Span | None]


def _row(spans: Sequence[Span], begin: float, scale: float, columns: range) -> list[_Cell]:
    """These columns of a rank's row, whose spans are in order."""
    cells: list[_Cell] = [(".", None)] * len(columns)
    ended = bisect_right(spans, columns.start, key=lambda span: round((span.end - begin) * scale))
    for span in islice(spans, ended, None):
        first, last = (round((time - begin) * scale) for time in (span.start, span.end))
        if first >= columns.stop:
            break
        text = _label(span).ljust(last - first)[: last - first]
        for column in range(max(first, columns.start), min(last, columns.stop)):
            cells[column - columns.start] = (text[column - first], span)
    return cells


def _pieces(cells: Sequence[_Cell]) -> Iterator[Piece]:
    for span, run in groupby(cells, key=itemgetter(1)):
        yield Piece("".join(character for character, _ in run), span)


def _label(span: Span) -> str:
    return f"{span.action.kind}{span.action.microbatch}"

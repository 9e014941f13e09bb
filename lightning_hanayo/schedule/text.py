"""CSV: reads and writes rows of actions in the format of torch.distributed.pipelining, a row per rank.

Draws a schedule or timeline as text, a row per rank: as a string, or in pieces that a caller may colour.
"""

import csv
import re
from bisect import bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby, islice, repeat, zip_longest
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import NamedTuple

from lightning_hanayo.errors import HanayoError, writing
from lightning_hanayo.schedule.simulate import Span, Timeline
from lightning_hanayo.schedule.table import Action, Rows

MAX_BYTES = 64 << 20
MAX_CELLS = 600_000
"""the largest file that is read: the check of such a table takes half a minute, with communication a third of that"""
_SMALLER = "that is no schedule, or it is too large: write it without communication, or for fewer micro-batches"
_SHARDING = re.compile(r"\d+(UNSHARD|RESHARD)")
_OVERLAPPED = re.compile(r"\(([^();]*;[^();]*)\)OVERLAP_[FBI]_[FBI]")
_TORCHS = {"F_I": "F_B"}
"""torch has one name for a forward and a backward of either kind; other pairs have names of our own"""


Pairs = Collection[tuple[Action, Action]]
"""Actions that a rank runs at once, each pair in one cell."""


def write_rows(path: str | Path, rows: Rows, pairs: Pairs = ()) -> None:
    """Write one line per rank. Raises `HanayoError` if the file can't be written."""
    partner_of = dict(pairs)
    with writing(path), open(path, "w", newline="") as file:
        csv.writer(file).writerows(map(partial(_texts, partner_of), rows))


def _texts(partner_of: Mapping[Action, Action], row: Sequence[Action]) -> Iterator[str]:
    """The cells of a row."""
    rest = iter(row)
    for action in rest:
        second = partner_of.get(action)
        if second is None:
            yield str(action)
        else:
            kinds = "_".join(str(one.kind) for one in (action, second))
            yield f"({action};{second})OVERLAP_{_TORCHS.get(kinds, kinds)}"
            next(rest)


def read_table(path: Path) -> tuple[Rows, frozenset[tuple[Action, Action]]]:
    """All actions in the file, communication too, one row per line; and the pairs, which share a cell.

    Raises `HanayoError` if the file can't be read, is too large, or has a cell that is no action.
    """
    rows, pairs = [], set()
    for rank, cells in enumerate(_cells_of(path)):
        row: list[Action] = []
        for column, cell in enumerate(cells):
            try:
                found = list(_actions(cell.strip()))
            except HanayoError as error:
                raise HanayoError(f"{path}, row {rank + 1}, cell {column + 1}: {error}") from None
            row += found
            if len(found) == 2:
                pairs.add((found[0], found[1]))
        rows.append(tuple(row))
    return rows, frozenset(pairs)


def locate_error(path: Path, error: HanayoError) -> HanayoError:
    """The error with its line and cell in the file. There, idle cells count, and so do those that were dropped."""
    if error.cell is None:
        return HanayoError(f"{path}: {error}")
    rank, position = error.cell
    found = ((column, action) for column, cell in enumerate(_cells_of(path)[rank]) for action in _actions(cell.strip()))
    columns = [column for column, action in found if action.kind.is_compute]
    where = f"cell {columns[position] + 1}" if position < len(columns) else "behind its last cell"
    return HanayoError(f"{path}, row {rank + 1}, {where}: {error}")


def _cells_of(path: Path) -> list[list[str]]:
    """The file's cells as text. A file that is too large is rejected before it is parsed."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise HanayoError(f"{path} has more than {MAX_BYTES >> 20} MiB; {_SMALLER}")
        cells = data.count(b",") + data.count(b"\n")
        if cells > MAX_CELLS:
            raise HanayoError(f"{path} has about {cells:,} cells, more than {MAX_CELLS:,}; {_SMALLER}")
        return list(csv.reader(data.decode("utf-8-sig").splitlines()))
    except UnicodeDecodeError as error:
        why = f"it is no text, see byte {error.start}; expected comma-separated cells like 0F0, 3B2"
        raise HanayoError(f"the schedule table {path} can't be read: {why}") from None
    except (OSError, csv.Error) as error:
        raise HanayoError(f"the schedule table {path} can't be read: {error}") from None


def _actions(cell: str) -> Iterator[Action]:
    """The actions of a cell: two in torch's `(3F1;2B4)OVERLAP_F_B`, which a rank runs at once.

    torch's own tables also gather and free sharded parameters, which is dropped here.
    """
    if not cell or _SHARDING.fullmatch(cell):
        return
    if both := _OVERLAPPED.fullmatch(cell):
        yield from map(Action.parse, both[1].split(";"))
    else:
        yield Action.parse(cell)


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

"""CSV: reads and writes rows of actions in the format of torch.distributed.pipelining, a row per rank."""

import csv
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from lightning_hanayo.errors import HanayoError, writing
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
    for rank, cells in enumerate(_cells(path)):
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
    found = ((column, action) for column, cell in enumerate(_cells(path)[rank]) for action in _actions(cell.strip()))
    columns = [column for column, action in found if action.kind.is_compute]
    where = f"cell {columns[position] + 1}" if position < len(columns) else "behind its last cell"
    return HanayoError(f"{path}, row {rank + 1}, {where}: {error}")


def _cells(path: Path) -> list[list[str]]:
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

"""Rejects a table with an error that draws the table as text and marks the wrong action."""

from typing import NoReturn

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Rows
from lightning_hanayo.schedule.table import Table

CONTEXT = 6
"""positions drawn before and after the marked one, and ranks above and below it"""
MAX_RANKS = 32
"""up to this many ranks, all are drawn"""


def reject(table: Table, cell: tuple[int, int], reason: str, rows: Rows | None = None) -> NoReturn:
    """Raise a `HanayoError` about the action at `cell`, a rank and a position in its row. Default rows: the table's."""
    drawing = table_text(table.actions if rows is None else rows, cell)
    error = HanayoError(f"schedule {table.name!r}, rank {cell[0]}, position {cell[1]}: {reason}\n{drawing}")
    error.cell = cell
    raise error


def table_text(rows: Rows, mark: tuple[int, int]) -> str:
    """The cells around `mark` (rank, position), a line per rank, the marked one in brackets.

    Example:
        >>> print(table_text(build("1f1b", num_ranks=2, num_microbatches=1).actions, mark=(1, 0)))
        rank 0   0F0   0B0
        rank 1  [1F0]  1B0
    """
    longest = max(map(len, rows), default=0)
    first, last = max(0, mark[1] - CONTEXT), min(longest, mark[1] + CONTEXT + 1)
    ranks = range(len(rows))
    if len(rows) > MAX_RANKS:
        ranks = range(max(0, mark[0] - CONTEXT), min(len(rows), mark[0] + CONTEXT + 1))
    cells = {rank: [str(action) for action in rows[rank][first:last]] for rank in ranks}
    width = max((len(cell) for row in cells.values() for cell in row), default=0)
    lines = []
    for rank, row in cells.items():
        drawn = [
            (f"[{cell}]" if mark == (rank, first + position) else f" {cell} ").ljust(width + 2)
            for position, cell in enumerate(row)
        ]
        head = f"rank {rank}".ljust(len(f"rank {len(rows) - 1}"))
        before, after = "..." if first else "", "..." if last < len(rows[rank]) else ""
        lines.append(f"{head} {before}{' '.join(drawn)}{after}".rstrip())
    return "\n".join(lines)

"""Prints tables: in colours in a terminal, as plain text in a pipe."""

import sys
from collections.abc import Sequence

PIPE_COLUMNS = 120
"""characters per line of a table in a pipe, unless it has more"""
_BETWEEN = 3
"""characters between two columns"""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], is_dim: Sequence[bool] | None = None) -> None:
    """Print a table. The first column is left-aligned, the others right-aligned; `is_dim` says which rows are grey.

    In a narrow terminal a cell takes several lines, and in a pipe lines are as long as needed: nothing is cut.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", overflow="fold")
    for row, dim in zip(rows, is_dim or [False] * len(rows), strict=True):
        table.add_row(*row, style="dim" if dim else None)
    width = None if sys.stdout.isatty() else max(PIPE_COLUMNS, _width([columns, *rows]))
    Console(highlight=False, markup=False, emoji=False, width=width).print(table)


def _width(rows: Sequence[Sequence[str]]) -> int:
    from rich.cells import cell_len

    return sum(max(map(cell_len, column)) + _BETWEEN for column in zip(*rows, strict=True))

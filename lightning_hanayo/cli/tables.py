"""Prints tables: in colours in a terminal, as plain text in a pipe."""

import sys
from collections.abc import Sequence

PIPE_COLUMNS = 120
"""characters per line of a table in a pipe"""


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], is_dim: Sequence[bool] | None = None) -> None:
    """Print a table. The first column is left-aligned, the others right-aligned; `is_dim` says which rows are grey."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row, dim in zip(rows, is_dim or [False] * len(rows), strict=True):
        table.add_row(*row, style="dim" if dim else None)
    Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)

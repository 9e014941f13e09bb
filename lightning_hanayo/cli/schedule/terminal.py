"""Terminal: timelines and tables where the user types, coloured where the terminal has colours, plain in a pipe."""

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from lightning_hanayo.plotting.legs import legs
from lightning_hanayo.plotting.palette import colour, ink
from lightning_hanayo.plotting.rows import legend
from lightning_hanayo.schedule import Timeline, timeline_text
from lightning_hanayo.schedule.text.timeline_text import timeline_lines

PIPE_COLUMNS = 120
"""of a table that goes into a pipe"""


def print_json(result: Any) -> None:
    """One JSON value."""
    print(json.dumps(result))


def print_timeline(timeline: Timeline, columns: int | None) -> None:
    """The rows, in bands as wide as the terminal (or `columns`); in a pipe uncut unless `columns` are given."""
    if not sys.stdout.isatty():
        print(timeline_text(timeline, columns, wrap=True))
        return
    from rich.console import Console
    from rich.text import Text

    console, shading = Console(highlight=False), legs(timeline)
    for line in timeline_lines(timeline, columns or shutil.get_terminal_size().columns, wrap=True):
        row = Text(line.head)
        for piece in line.pieces:
            shade = colour(piece.span.action, shading) if piece.span else None
            row.append(piece.text, style=f"{ink(shade)} on {shade}" if shade else "dim")
        console.print(row, soft_wrap=True)
    names = Text()
    for name, shade in legend([timeline]).items():
        names.append("  ", style=f"on {shade}")
        names.append(f" {name}   ")
    console.print(names)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], faint: Sequence[bool]) -> None:
    """A table: the first column to the left, numbers to the right; faint rows less bright."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row, less in zip(rows, faint, strict=True):
        table.add_row(*row, style="dim" if less else None)
    Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)

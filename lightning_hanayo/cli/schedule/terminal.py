"""Prints timelines and tables: in colours in a terminal, as plain text in a pipe."""

import shutil
import sys
from collections.abc import Sequence

from lightning_hanayo.plotting.palette import action_colour, legend_entries, text_colour, wave_legs
from lightning_hanayo.schedule import Timeline, timeline_text
from lightning_hanayo.schedule.text.timeline_text import timeline_lines

PIPE_COLUMNS = 120
"""characters per line of a table in a pipe"""


def print_timeline(timeline: Timeline, columns: int | None) -> None:
    """Print the timeline, broken into lines of `columns` characters; None: the width of the terminal, if it is one."""
    if not sys.stdout.isatty():
        print(timeline_text(timeline, columns, wrap=True))
        return
    from rich.console import Console
    from rich.text import Text

    console, legs = Console(highlight=False), wave_legs(timeline)
    for line in timeline_lines(timeline, columns or shutil.get_terminal_size().columns, wrap=True):
        row = Text(line.head)
        for piece in line.pieces:
            colour = action_colour(piece.span.action, legs) if piece.span else None
            row.append(piece.text, style=f"{text_colour(colour)} on {colour}" if colour else "dim")
        console.print(row, soft_wrap=True)
    legend = Text()
    for label, colour in legend_entries([timeline]).items():
        legend.append("  ", style=f"on {colour}")
        legend.append(f" {label}   ")
    console.print(legend)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], is_dim: Sequence[bool]) -> None:
    """Print a table. The first column is left-aligned, the others right-aligned."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for row, dim in zip(rows, is_dim, strict=True):
        table.add_row(*row, style="dim" if dim else None)
    Console(highlight=False, width=None if sys.stdout.isatty() else PIPE_COLUMNS).print(table)

"""Prints timelines: in colours in a terminal, as plain text in a pipe."""

import shutil
import sys

from lightning_hanayo.plotting.palette import action_colour, legend_entries, text_colour, wave_legs
from lightning_hanayo.schedule import Timeline, timeline_text
from lightning_hanayo.schedule.text.timeline_text import timeline_lines


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

"""Prints timelines: in colours in a terminal, as plain text in a pipe."""

import shutil
import sys
from collections.abc import Callable
from itertools import islice

from lightning_hanayo.plotting.palette import action_colour, legend_entries, text_colour, wave_legs
from lightning_hanayo.schedule import Timeline
from lightning_hanayo.schedule.text.timeline_text import Line, timeline_lines

MAX_LINES = 2000
"""of a drawing in a terminal or a pipe; what comes after them is for a picture"""


def print_timeline(timeline: Timeline, columns: int | None) -> None:
    """Print the timeline, broken into lines of `columns` characters; None: the width of the terminal, if it is one."""
    is_terminal = sys.stdout.isatty()
    if columns is None and is_terminal:
        columns = shutil.get_terminal_size().columns
    lines = timeline_lines(timeline, columns, wrap=True)
    show = _printer(timeline) if is_terminal else _print_plain
    for line in islice(lines, MAX_LINES):
        show(line)
    if next(lines, None) is not None:
        print(f"... cut after {MAX_LINES:,} lines; to see all: --output schedule.png, or fewer ranks or micro-batches")
    elif is_terminal:
        _print_legend(timeline)


def _print_plain(line: Line) -> None:
    print((line.head + "".join(piece.text for piece in line.pieces)).rstrip())


def _printer(timeline: Timeline) -> Callable[[Line], None]:
    """Prints lines in colours."""
    from rich.console import Console
    from rich.text import Text

    console, legs = Console(highlight=False), wave_legs(timeline)

    def show(line: Line) -> None:
        row = Text(line.head)
        for piece in line.pieces:
            colour = action_colour(piece.span.action, legs) if piece.span else None
            row.append(piece.text, style=f"{text_colour(colour)} on {colour}" if colour else "dim")
        console.print(row, soft_wrap=True)

    return show


def _print_legend(timeline: Timeline) -> None:
    from rich.console import Console
    from rich.text import Text

    legend = Text()
    for label, colour in legend_entries([timeline]).items():
        legend.append("  ", style=f"on {colour}")
        legend.append(f" {label}   ")
    Console(highlight=False).print(legend)

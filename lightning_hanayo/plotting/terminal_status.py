"""Shows in a terminal what is being done, and for how long; in a pipe nothing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def showing(text: str) -> Iterator[Callable[[str], None]]:
    """Show a line on stderr while the block runs: a spinner, what is done, the time it has taken. Then it vanishes.

    Example:
        >>> with showing("comparing schedules") as say:
        ...     say("comparing schedules: hanayo-zb")

    Yields:
        What changes the text.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console  # not for those who write to a pipe
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as progress:
        task = progress.add_task(text)
        yield lambda text: progress.update(task, description=text)

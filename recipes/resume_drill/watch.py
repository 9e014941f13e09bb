"""Shows a drill while it runs, and draws its steps against time."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from recipes.resume_drill.drill import Event

SHOWN = 12
_STYLES = {"kill": "bold red", "said": "yellow", "left": "red", "start": "green", "end": "bold green"}


class Watch:
    """A bar with the steps, and below it the last events. `with Watch(...) as watch: Drill(..., tell=watch)`."""

    def __init__(self, title: str, num_steps: int, console: Console) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._progress = Progress(*columns)
        self._task = self._progress.add_task(title, total=num_steps)
        self._lines: list[Text] = []
        self._live = Live(console=console, refresh_per_second=8)

    def __enter__(self) -> "Watch":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._live.console.print()

    def __call__(self, event: Event) -> None:
        """Show an event."""
        self._progress.update(self._task, completed=event.step)
        if event.kind != "step":
            self._lines.append(Text(line_of(event), _STYLES[event.kind], no_wrap=True, overflow="ellipsis"))
        self._live.update(Group(self._progress, *self._lines[-SHOWN:]))


def line_of(event: Event) -> str:
    """The event as a line.

    Example:
        >>> line_of(Event(12.345, "kill", 43, "rank 2"))
        '  12.3 s  step  43  kill  rank 2'
    """
    return f"{event.seconds:6.1f} s  step {event.step:3d}  {event.kind:<5} {event.text}".rstrip()


def draw(events: Sequence[Event], path: Path) -> None:
    """Steps against time; crosses are kills, dots are starts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    for kind, style, label in (("step", "-", ""), ("kill", "rX", "killed"), ("start", "g.", "started")):
        own = [event for event in events if event.kind == kind]
        axes.plot([event.seconds for event in own], [event.step for event in own], style, label=label)
    axes.set(xlabel="seconds", ylabel="optimizer steps")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)

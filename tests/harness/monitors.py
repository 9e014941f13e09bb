"""Worlds of monitors in the threads of one process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_hanayo.monitor.monitor import Monitor
from lightning_hanayo.monitor.peers import Timing

Worlds = Callable[..., list[Monitor]]
QUICK = Timing(ping=0.05, silent=0.25, lost=0.2, takeover=0.2, look=0.05)


@contextmanager
def worlds() -> Iterator[Worlds]:
    """Makes linked monitors; they are closed in the end."""
    made: list[Monitor] = []

    def link(num_ranks: int, timing: Timing = QUICK, token: str = "a secret") -> list[Monitor]:
        monitors = [Monitor(rank, num_ranks, f"pipeline {rank}", "127.0.0.1", timing) for rank in range(num_ranks)]
        made.extend(monitors)
        for monitor in monitors:
            monitor.connect([one.member for one in monitors], token)
        return monitors

    try:
        yield link
    finally:
        for monitor in made:
            monitor.close()

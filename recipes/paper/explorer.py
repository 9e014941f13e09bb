"""The page that compares schedules for a choice of P, B and W: `explore.html` of the site."""

from itertools import product
from pathlib import Path
from typing import Any

from lightning_hanayo.plotting import save_page
from lightning_hanayo.schedule import Timeline, build, simulate

RANKS, MICROBATCHES, WAVES = (2, 4, 8), (4, 8, 16), (1, 2)
NAMES = {"1f1b": (None,), "zbv": (None,), "hanayo": WAVES, "hanayo-zb": WAVES}
"""the schedules, with their numbers of waves"""


def draw(path: Path) -> None:
    """Write the page. Forward, input and weight gradients take equally long, and messages are free."""
    timelines: dict[str, Timeline] = {}
    chosen = []
    for ranks, microbatches, (name, numbers) in product(RANKS, MICROBATCHES, NAMES.items()):
        for waves in numbers:
            options: dict[str, Any] = {} if waves is None else {"num_waves": waves}
            label = name if waves is None else f"{name}, W = {waves}"
            schedule = build(name, num_ranks=ranks, num_microbatches=microbatches, **options)
            timelines[f"{label}: P = {ranks}, B = {microbatches}"] = simulate(schedule)
            chosen.append((str(ranks), str(microbatches), None if waves is None else str(waves)))
    choices = dict(zip("PBW", zip(*chosen, strict=True), strict=True))
    title = "Schedules side by side: P ranks, B micro-batches, W waves"
    save_page(path, title, timelines, unit="T_F", choices=choices)

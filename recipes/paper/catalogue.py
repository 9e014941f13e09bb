"""Draws a picture of every schedule. Their figures are in `peers.table`."""

from pathlib import Path

from lightning_hanayo.plotting import save_timeline
from recipes.paper.contender import Contender

PICTURED = (
    Contender("gpipe"),
    Contender("1f1b"),
    Contender("interleaved", num_stages_per_rank=2),
    Contender("chimera"),
    Contender("hanayo", num_waves=1),
    Contender("hanayo", num_waves=2),
    Contender("zb-h1"),
    Contender("interleaved-zb", num_stages_per_rank=2),
    Contender("zbv"),
    Contender("v-half"),
    Contender("v-min"),
    Contender("dualpipev"),
    Contender("hanayo-zb", num_waves=1),
    Contender("hanayo-zb", num_waves=2),
)

NUM_RANKS = 4


def file_name(contender: Contender) -> str:
    """The file name of its picture."""
    waves = f"-w{contender.num_waves}" if contender.name.startswith("hanayo") else ""
    return f"schedule-{contender.name}{waves}.png"


def draw(folder: Path) -> None:
    """Draw one picture per schedule into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for contender in PICTURED:
        # two waves have twice as many boxes, so half the micro-batches keep the picture small
        num_microbatches = 4 if contender.num_waves == 2 else 8
        title = f"{contender.name}, {NUM_RANKS} ranks, {num_microbatches} micro-batches"
        save_timeline(folder / file_name(contender), contender.timeline(NUM_RANKS, num_microbatches), title=title)

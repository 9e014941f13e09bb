"""Write a schedule as the CSV table that torch.distributed.pipelining reads: a row per rank, cells like 0F0, 3I2, 3W2.

With --communication the table includes sends, receives and gradient reductions (torch's format compute_comms);
without, only compute actions (compute_only).
"""

import json
from argparse import ArgumentParser
from pathlib import Path

from lightning_hanayo.cli.schedule.options import Options, add_costs, add_schedule
from lightning_hanayo.cli.schedule.summary import sizes_text
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting.terminal_status import showing


def add_options(parser: ArgumentParser) -> None:
    """Add the schedule, the costs to build it for, and the file."""
    add_schedule(parser)
    parser.add_argument("file", metavar="OUT.csv", help="the file to write")
    parser.add_argument("--communication", action="store_true", help="include sends, receives and gradient reductions")
    add_costs(parser)


def run(options: Options) -> int:
    """Write the table."""
    path = Path(options.file)
    if path.suffix.lower() != ".csv":
        raise HanayoError(f"{path}: the name of a table must end in .csv")
    with showing("building the schedule"):
        schedule = options.make_schedule()
    schedule.to_csv(path, communication=options.communication)
    if options.json:
        print(json.dumps({"schedule": schedule.name, "file": str(path), "communication": options.communication}))
    else:
        print(f"wrote {path}: {schedule.name}, {sizes_text(schedule)}")
    return 0

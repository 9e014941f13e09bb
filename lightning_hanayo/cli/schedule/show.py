"""Draw the timeline of one schedule, simulated with the given costs.

Without --output it is drawn in the terminal. The suffix of an output file chooses its format: .png, .svg or .pdf (an
image), .html (an interactive page in one file), .json (a trace for ui.perfetto.dev).
"""

import json
from argparse import ArgumentParser
from pathlib import Path

from lightning_hanayo.cli.schedule.argument_types import integer
from lightning_hanayo.cli.schedule.options import Options, add_costs, add_schedule
from lightning_hanayo.cli.schedule.summary import summary_dict, summary_line, title
from lightning_hanayo.cli.schedule.terminal import print_timeline
from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.plotting import save_page, save_timeline, save_trace
from lightning_hanayo.plotting.image import FORMATS
from lightning_hanayo.plotting.terminal_status import showing
from lightning_hanayo.schedule import Schedule, Timeline


def add_options(parser: ArgumentParser) -> None:
    """Add the schedule, its costs, and how to draw it."""
    add_schedule(parser)
    add_costs(parser)
    meaning = "add a stage for head and loss on rank 0, as training does for schedules that end on another rank"
    parser.add_argument("--loss-stage", action="store_true", help=meaning)
    meaning = "a file to write; can be repeated"
    parser.add_argument("-o", "--output", action="append", default=[], metavar="FILE", help=meaning)
    meaning = "draw the path of micro-batch M as a line; can be repeated"
    parser.add_argument("--follow", type=integer, action="append", default=[], metavar="M", help=meaning)
    parser.add_argument("--activations", action="store_true", help="also draw each rank's activations in an image")
    parser.add_argument("--columns", type=integer, metavar="N", help="characters per line in the terminal")


def run(options: Options) -> int:
    """Draw the schedule in the terminal, or write the output files."""
    for path in options.output:
        check_output(path)
    with showing("building the schedule"):
        schedule = options.make_schedule()
    for microbatch in options.follow:
        if microbatch not in range(schedule.num_microbatches):
            last = schedule.num_microbatches - 1
            raise HanayoError(f"--follow: there is no micro-batch {microbatch}, micro-batches are 0 to {last}")
    if options.columns is not None and options.columns < 20:
        raise HanayoError(f"--columns: expected at least 20, got {options.columns}")
    with showing("simulating"):
        timeline = options.simulate(schedule)
    for path in options.output:
        with showing(f"drawing {path}"):
            _save(path, schedule, timeline, options)
    if options.json:
        spans = json.loads(timeline.to_json())["spans"]
        print(json.dumps({**summary_dict(schedule, timeline), "files": options.output, "spans": spans}))
        return 0
    print(title(schedule))
    print(summary_line(schedule, timeline, options.unit))
    if not options.output:
        print()
        print_timeline(timeline, options.columns)
    for path in options.output:
        print(f"wrote {path}")
    return 0


def check_output(path: str) -> None:
    """Raise a HanayoError if an output file has an unknown suffix or its folder doesn't exist."""
    suffix, known = Path(path).suffix, [f".{suffix}" for suffix in (*FORMATS, "html", "json")]
    if suffix.lower() not in known:
        raise HanayoError(f"--output {path}: the suffix {suffix!r} is unknown; {nearest(suffix, known)}")
    if not Path(path).parent.is_dir():
        raise HanayoError(f"--output {path}: there is no folder {Path(path).parent}")


def _save(path: str, schedule: Schedule, timeline: Timeline, options: Options) -> None:
    match Path(path).suffix.lower():
        case ".html":
            save_page(path, title(schedule), {schedule.name: timeline}, unit=options.unit)
        case ".json":
            save_trace(path, {title(schedule): timeline}, seconds=unit_seconds(options.unit))
        case _:
            look = {"unit": options.unit, "follow": options.follow, "activations": options.activations}
            save_timeline(path, timeline, title=title(schedule), **look)


def unit_seconds(unit: str) -> float:
    """The length of a unit of time in seconds. Traces show an unknown unit as a millisecond."""
    return {"s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6}.get(unit, 1e-3)

"""Draw one schedule as it runs under given costs.

Without --output the terminal shows it. Else its suffix says what is written: .png, .svg or .pdf (a picture),
.html (a page to look around in, one file that loads nothing), .json (a trace for ui.perfetto.dev).
"""

import json
from pathlib import Path

from lightning_hanayo.cli.schedule.figures import figures, sentence
from lightning_hanayo.cli.schedule.options import Options, Parser, add_costs, add_json, add_schedule, title, whole
from lightning_hanayo.cli.schedule.terminal import print_json, print_timeline
from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.plotting import save_page, save_timeline, save_trace
from lightning_hanayo.plotting.picture import FORMATS
from lightning_hanayo.schedule import Schedule, Timeline


def add_options(parser: Parser) -> None:
    """A schedule, its costs, and where to draw it."""
    add_schedule(parser)
    add_costs(parser)
    parser.add_argument(
        "--loss-stage",
        action="store_true",
        help="head and loss on rank 0, as training plays schedules that end elsewhere",
    )
    parser.add_argument("-o", "--output", action="append", metavar="FILE", help="a file to write; may be given again")
    parser.add_argument(
        "--follow",
        type=whole,
        action="append",
        metavar="M",
        help="draw micro-batch M's way as a line; may be given again",
    )
    parser.add_argument("--activations", action="store_true", help="draw what each rank holds below a picture")
    parser.add_argument("--columns", type=whole, metavar="N", help="characters per line in the terminal")
    add_json(parser)


def run(options: Options) -> int:
    """Draw."""
    files = options.output or []
    for path in files:
        check_output(path)
    schedule = options.make_schedule()
    for microbatch in options.follow or []:
        if microbatch not in range(schedule.num_microbatches):
            last = schedule.num_microbatches - 1
            raise HanayoError(f"--follow: there is no micro-batch {microbatch}, micro-batches are 0 to {last}")
    if options.columns is not None and options.columns < 20:
        raise HanayoError(f"--columns: expected at least 20, got {options.columns}")
    timeline = options.simulate(schedule)
    for path in files:
        _save(path, schedule, timeline, options)
    if options.json:
        spans = json.loads(timeline.to_json())["spans"]
        print_json({**figures(schedule, timeline), "files": files, "spans": spans})
        return 0
    print(title(schedule))
    print(sentence(schedule, timeline, options.unit))
    if not files:
        print()
        print_timeline(timeline, options.columns)
    for path in files:
        print(f"wrote {path}")
    return 0


def check_output(path: str, others: tuple[str, ...] = ("html", "json")) -> None:
    """Refuse a file that can't be written before anything is computed.

    Raises:
        HanayoError: its suffix says nothing to us, or its folder isn't there.
    """
    suffix, known = Path(path).suffix, [f".{one}" for one in (*FORMATS, *others)]
    if suffix.lower() not in known:
        raise HanayoError(f"--output {path}: the suffix {suffix!r} isn't known; {nearest(suffix, known)}")
    if not Path(path).parent.is_dir():
        raise HanayoError(f"--output {path}: there is no folder {Path(path).parent}")


def _save(path: str, schedule: Schedule, timeline: Timeline, options: Options) -> None:
    match Path(path).suffix.lower():
        case ".html":
            save_page(path, title(schedule), {schedule.name: timeline}, unit=options.unit)
        case ".json":
            save_trace(path, {title(schedule): timeline}, seconds=SECONDS.get(options.unit, 1e-3))
        case _:
            save_timeline(
                path,
                timeline,
                title=title(schedule),
                unit=options.unit,
                follow=options.follow or (),
                activations=options.activations,
            )


SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6}
"""the units that a trace shows as they are; of another, one is shown as a millisecond"""

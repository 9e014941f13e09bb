"""Runs `hanayo schedule`: show, compare, check and export schedules. No subcommand imports torch.

Converts the values of command-line options to numbers. An ArgumentTypeError is shown to the user.

Defines the options that the subcommands share, and builds the schedule, costs and timeline that they ask for.

Summarizes a schedule and its timeline, in words and as JSON.

Prints timelines: in colours in a terminal, as plain text in a pipe.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from functools import cached_property, partial
from itertools import islice
from math import inf, isfinite
from pathlib import Path
from typing import Any

from lightning_hanayo.cli.common import CommandGroup, fail, number, print_table
from lightning_hanayo.errors import HanayoError, counted, nearest
from lightning_hanayo.planner.files import Profile
from lightning_hanayo.plotting import save_page, save_ranking, save_timeline, save_trace
from lightning_hanayo.plotting.palette import action_colour, legend_entries, text_colour, wave_legs
from lightning_hanayo.plotting.terminal_status import showing
from lightning_hanayo.schedule import (
    CostModel,
    Kind,
    Schedule,
    Timeline,
    build,
    schedule_names,
    simulate,
    with_loss_stage,
)
from lightning_hanayo.schedule.communication import messages_per_microbatch
from lightning_hanayo.schedule.comparison import Comparison, compare
from lightning_hanayo.schedule.cost import gather_compute_scatter
from lightning_hanayo.schedule.text import timeline_lines

SUBCOMMANDS = {
    "show": "draw one schedule: in the terminal, or as an image, HTML page or trace",
    "compare": "compare all schedules for the same sizes and costs, the fastest first",
    "check": "check whether a CSV table is a valid schedule",
    "export": "write a schedule as the CSV table that torch.distributed.pipelining reads",
}
_EXAMPLE = "show hanayo --ranks 4 --microbatches 8 --waves 2 --output wave.html"
_GROUP = CommandGroup("schedule", "Draw, compare, check and write pipeline schedules.", SUBCOMMANDS, _EXAMPLE)


def run(argv: list[str]) -> int:
    """Run the subcommand that `argv` names, and return the exit code."""
    return _GROUP.run(argv, Options())


non_negative = number(lambda value: 0 <= value < inf, "a number of at least 0")
positive = number(lambda value: 0 < value < inf, "a number above 0")
integer = number(isfinite, "a whole number", int)
"""Its range is checked where it is used."""


def integer_or_auto(text: str) -> int | str:
    """A whole number, or "auto"."""
    return text if text == "auto" else integer(text)


def cost(text: str) -> float | tuple[float, ...]:
    """A number, or one per stage, separated by commas: "0.5", "1,1,2,1"."""
    values = tuple(map(non_negative, text.split(",")))
    return values if len(values) > 1 else values[0]


DEFAULT_RANKS = 4

_COSTS = {
    "forward": "time of a micro-batch's forward in a rank's share of the model (T_F; default 1), or one per stage",
    "backward_input": "the same for the gradients of the inputs (default 1)",
    "backward_weight": "the same for the gradients of the weights (default 1)",
    "message": "time of one message between two ranks (T_C; default 0)",
    "message_between_nodes": "time of one message between two nodes; --message is then within a node",
    "per_action": "time that each action takes besides, however small its stage: the host's (default 0)",
    "gradient_reduce": "time to all-reduce a rank's gradients over the data ranks, once per step (default 0)",
}
_NUMBERS = ("message_between_nodes", "per_action")


def no_such_schedule(name: str, known: Iterable[str]) -> HanayoError:
    """Returns the error for a name that is neither a known schedule nor a table."""
    return HanayoError(f"there is no schedule {name!r}: {nearest(name, known)}; or a file ending in .csv")


def add_schedule(parser: ArgumentParser) -> None:
    """Add a schedule: by name and sizes, or from a file."""
    names = ", ".join(schedule_names())
    parser.add_argument("schedule", metavar="NAME|FILE.csv", help=f"{names}, auto (the best); or a table of actions")
    add_sizes(parser, integer_or_auto, " or auto")
    meaning = "stages on each rank, for interleaved schedules"
    parser.add_argument("-V", "--stages-per-rank", type=integer, metavar="V", help=meaning)


def add_sizes(parser: ArgumentParser, waves: Callable[[str], int | str] = integer, choice: str = "") -> None:
    """Add the numbers of ranks, micro-batches and waves."""
    parser.add_argument("-P", "--ranks", type=integer, metavar="P", help=f"pipeline ranks (default {DEFAULT_RANKS})")
    parser.add_argument("-B", "--microbatches", type=integer, metavar="B", help="micro-batches per step (default P)")
    meaning = f"waves{choice}; each has two stages per rank (default 1)"
    parser.add_argument("-W", "--waves", type=waves, metavar="W", help=meaning)


def add_costs(parser: ArgumentParser) -> None:
    """Add the costs, the activation budget, and the simulation's length."""
    meaning = "costs (in ms) and sizes that a training run has measured; other options override them"
    parser.add_argument("--costs", dest="profile", metavar="PROFILE.json", help=meaning)
    for name, meaning in _COSTS.items():
        to_cost, metavar = (non_negative, "T") if name in _NUMBERS else (cost, "T[,T...]")
        parser.add_argument(f"--{name.replace('_', '-')}", type=to_cost, metavar=metavar, help=meaning)
    parser.add_argument("--ranks-per-node", type=integer, metavar="N", help="required by --message-between-nodes")
    meaning = (
        "let ranks run two micro-batches at once; R: the time of an action's collectives, in that of its compute (1)"
    )
    parser.add_argument("--pairs", type=positive, nargs="?", const=1.0, metavar="R", help=meaning)
    meaning = "the maximum of activations on a rank, in micro-batches (M_a)"
    parser.add_argument("--activation-budget", type=positive, metavar="M", help=meaning)
    meaning = "consecutive steps, without a barrier (default 1)"
    parser.add_argument("--steps", type=integer, default=1, metavar="N", help=meaning)
    meaning = "the unit of time shown in images, such as ms"
    parser.add_argument("--unit", dest="given_unit", default="", metavar="U", help=meaning)


class Options(Namespace):
    """The parsed options, and what they ask for: a schedule, its costs, its timeline."""

    @property
    def costs(self) -> CostModel:
        """The costs given as options; for the others, those of the profile, or defaults."""
        names = {field.name for field in fields(CostModel)}
        given = {name: value for name, value in vars(self).items() if name in names and value is not None}
        if self.pairs is not None:
            given["segments"] = gather_compute_scatter(self.pairs)
        return replace(self._profile.costs.scaled(1e3) if self._profile is not None else CostModel(), **given)

    @cached_property
    def _profile(self) -> Profile | None:
        return None if self.profile is None else Profile.load(self.profile)

    @property
    def unit(self) -> str:
        """The unit of time to show."""
        return str(self.given_unit) or ("ms" if self.profile is not None else "")

    @property
    def sizes(self) -> dict[str, Any]:
        """Ranks, micro-batches and waves, as arguments of `build` and `compare`: as given, or those of the profile."""
        ranks = DEFAULT_RANKS if self.ranks is None else self.ranks
        otherwise = {"num_ranks": ranks, "num_microbatches": ranks, "num_waves": 1}
        if (profile := self._profile) is not None:
            otherwise = {name: getattr(profile, name) for name in otherwise}
        given = (self.ranks, self.microbatches, self.waves)
        return {name: size if one is None else one for (name, size), one in zip(otherwise.items(), given, strict=True)}

    def make_schedule(self) -> Schedule:
        """The schedule: built, or read from its file.

        Raises:
            HanayoError: there is no such schedule, or it doesn't exist in these sizes.
        """
        name, known = self.schedule, (*schedule_names(), "auto")
        if name.endswith(".csv") or Path(name).is_file() or "/" in name:
            given = {"ranks": self.ranks, "microbatches": self.microbatches, "waves": self.waves}
            given["stages-per-rank"] = self.stages_per_rank
            if superfluous := [f"--{option}" for option, value in given.items() if value is not None]:
                raise HanayoError(f"{name} is a table, which has its own sizes; leave out {', '.join(superfluous)}")
            schedule = Schedule.from_csv(name)
        elif name in known:
            sizes = self.sizes | {"num_stages_per_rank": self.stages_per_rank}
            budget, pairs = self.activation_budget, self.pairs is not None
            schedule = build(name, **sizes, costs=self.costs, activation_budget=budget, pairs=pairs)
        else:
            raise no_such_schedule(name, known)
        return with_loss_stage(schedule) if vars(self).get("loss_stage") else schedule

    def simulate(self, schedule: Schedule) -> Timeline:
        """The schedule's timeline with these costs."""
        return simulate(schedule, self.costs, self.steps)


def check_options(parser: ArgumentParser) -> None:
    """Add the file and the costs to simulate it with."""
    parser.add_argument("file", metavar="FILE.csv", help="the table")
    add_costs(parser)


def run_check(options: Options) -> int:
    """Check whether a CSV table is a valid schedule: each action once, on the rank of its stage, and no deadlock.

    The table has one row per rank, with cells like 0F0, 3I2, 3W2. This reads the tables of `hanayo schedule export` and
    both formats of torch.distributed.pipelining: compute_only, and compute_comms without its sends and receives, which
    follow from the compute actions. The exit code is 0 if the table is valid, and 2 with an error that names the cell
    if not.
    """
    try:
        schedule = Schedule.from_csv(options.file)
    except HanayoError as error:
        if options.json:
            print(json.dumps({"valid": False, "error": str(error)}))
        return fail(str(error))
    timeline = options.simulate(schedule)
    peak, budget = max(timeline.peak_activations), options.activation_budget
    exceeds_budget = budget is not None and peak > budget + 1e-9
    if options.json:
        inside = None if budget is None else not exceeds_budget
        print(json.dumps({"valid": True, **summary_dict(schedule, timeline, inside)}))
    else:
        print(f"{options.file} is a schedule: {sizes_text(schedule)}, backward {backward_mode(schedule)}")
        print(summary_line(schedule, timeline, options.unit))
    if exceeds_budget:
        return fail(f"{options.file} holds {peak:g} M_a of activations, more than --activation-budget {budget:g}")
    return 0


def compare_options(parser: ArgumentParser) -> None:
    """Add sizes, costs and output files."""
    meaning = "schedules to compare (default: all), and tables of the same sizes"
    parser.add_argument("schedules", nargs="*", default=[], metavar="NAME|FILE.csv", help=meaning)
    add_sizes(parser)
    add_costs(parser)
    meaning = "an image, HTML page or trace to write; can be repeated"
    parser.add_argument("-o", "--output", action="append", default=[], metavar="FILE", help=meaning)


def run_compare(options: Options) -> int:
    """Compare all schedules for the same ranks, micro-batches, stages per rank and costs, the fastest first.

    Wave schedules have W waves, interleaved ones 2W stages per rank. Schedules with two stages per rank are compared if
    W = 1, those with one stage always. A schedule that doesn't exist in these sizes is listed with the reason. Costs
    per stage are those of the schedule with the most stages; the stages of the others have sums of them.
    """
    tables = {name: Schedule.from_csv(name) for name in options.schedules if name.endswith(".csv")}
    names = [name for name in options.schedules if name not in tables] or None
    for name in names or ():
        if name not in schedule_names():
            raise no_such_schedule(name, schedule_names())
    sizes, budget = options.sizes, options.activation_budget
    for table in tables.values():
        if options.ranks is None:
            sizes["num_ranks"] = table.num_ranks
        if options.microbatches is None:
            sizes["num_microbatches"] = table.num_microbatches
    with showing("comparing schedules") as say:
        comparison = compare(
            **sizes,
            costs=options.costs,
            activation_budget=budget,
            steps=options.steps,
            pairs=options.pairs is not None,
            names=names,
            tables=tables,
            tell=lambda name: say(f"building and simulating {name}"),
        )
    if not comparison.candidates:
        raise HanayoError("; ".join(dict.fromkeys(comparison.refused.values())))
    title = f"P = {sizes['num_ranks']}, W = {sizes['num_waves']}, B = {sizes['num_microbatches']}"
    ranking = partial(save_ranking, comparison=comparison, title=title, unit=options.unit)
    _draw(options, title, {one.name: one.timeline for one in comparison.candidates}, ranking)
    if options.json:
        schedules = [
            summary_dict(one.schedule, one.timeline, None if budget is None else one.within_budget)
            for one in comparison.candidates
        ]
        print(json.dumps({"schedules": schedules, "refused": comparison.refused, "files": options.output}))
        return 0
    print(title + (f", activation budget {budget:g} M_a" if budget is not None else ""))
    _print_comparison(comparison, budget)
    for path in options.output:
        print(f"wrote {path}")
    return 0


def _print_comparison(comparison: Comparison, budget: float | None) -> None:
    columns = ["schedule", "makespan", "bubble", "activations [M_a]", "messages / micro-batch"]
    has_steps = comparison.candidates[0].timeline.num_steps > 1
    columns += ["last step's bubble"] * has_steps + ["in budget"] * (budget is not None)
    rows = []
    for one in comparison.candidates:
        row = [one.name, f"{one.timeline.makespan:.5g}", f"{one.timeline.bubble_ratio:.1%}", f"{one.peak:.4g}"]
        row.append(str(messages_per_microbatch(one.schedule)))
        row += [f"{one.timeline.step_bubbles[-1]:.1%}"] * has_steps
        rows.append(row + ["yes" if one.within_budget else "no"] * (budget is not None))
    print_table(columns, rows, [not one.within_budget for one in comparison.candidates])
    for name, reason in comparison.refused.items():
        print(f"{name} is left out: {reason}")


def _draw(options: Options, title: str, timelines: Mapping[str, Timeline], image: Callable[[str], object]) -> None:
    """Write all files that are asked for: pages, traces, and images by `image`."""
    for path in options.output:
        suffix = Path(path).suffix.lower()
        with showing(f"drawing {path}"):
            if suffix == ".html":
                save_page(path, title, timelines, unit=options.unit)
            elif suffix == ".json":
                seconds = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "\u00b5s": 1e-6}.get(options.unit, 1e-3)  # others are a ms
                save_trace(path, timelines, seconds=seconds)
            else:
                image(path)


def export_options(parser: ArgumentParser) -> None:
    """Add the schedule, the costs to build it for, and the file."""
    add_schedule(parser)
    parser.add_argument("file", metavar="OUT.csv", help="the file to write")
    parser.add_argument("--communication", action="store_true", help="include sends, receives and gradient reductions")
    add_costs(parser)


def run_export(options: Options) -> int:
    """Write a schedule as the CSV table that torch.distributed.pipelining reads: a row per rank, cells like 0F0, 3I2,
    3W2.

    With --communication the table includes sends, receives and gradient reductions (torch's format compute_comms);
    without, only compute actions (compute_only).
    """
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


def show_options(parser: ArgumentParser) -> None:
    """Add the schedule, its costs, and how to draw it."""
    add_schedule(parser)
    add_costs(parser)
    meaning = "add a stage for head and loss on rank 0, as training does for schedules that end on another rank"
    parser.add_argument("--loss-stage", action="store_true", help=meaning)
    meaning = "a file to write; can be repeated"
    parser.add_argument("-o", "--output", action="append", default=[], metavar="FILE", help=meaning)
    meaning = "draw the path of micro-batch M as a line; can be repeated"
    parser.add_argument("--follow", type=integer, action="append", default=[], metavar="M", help=meaning)
    parser.add_argument("--columns", type=integer, metavar="N", help="characters per line in the terminal")


def run_show(options: Options) -> int:
    """Draw the timeline of one schedule, simulated with the given costs.

    Without --output it is drawn in the terminal. The suffix of an output file chooses its format: .png, .svg or .pdf
    (an image), .html (an interactive page in one file), .json (a trace for ui.perfetto.dev).
    """
    with showing("building the schedule"):
        schedule = options.make_schedule()
    for microbatch in options.follow:
        if microbatch not in range(schedule.num_microbatches):
            last = schedule.num_microbatches - 1
            raise HanayoError(f"--follow: there is no micro-batch {microbatch}, micro-batches are 0 to {last}")
    with showing("simulating"):
        timeline = options.simulate(schedule)
    image = partial(save_timeline, timeline=timeline, title=title(schedule), unit=options.unit, follow=options.follow)
    _draw(options, title(schedule), {schedule.name: timeline}, image)
    if options.json:
        spans = [{"rank": s.rank, "action": str(s.action), "start": s.start, "end": s.end} for s in timeline.spans]
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


def title(schedule: Schedule) -> str:
    """The name and the sizes of a schedule: "hanayo: 4 ranks, 2 stages per rank, 8 micro-batches"."""
    return f"{schedule.name}: {sizes_text(schedule)}"


def sizes_text(schedule: Schedule) -> str:
    """The sizes of a schedule in words."""
    num_stages = sorted({len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)})
    stages = counted(schedule.num_stages, "stage")
    if len(num_stages) == 1:
        stages = f"{counted(num_stages[0], 'stage')} per rank"
    return f"{counted(schedule.num_ranks, 'rank')}, {stages}, {counted(schedule.num_microbatches, 'micro-batch')}"


def summary_line(schedule: Schedule, timeline: Timeline, unit: str) -> str:
    """Makespan, bubble, peak activations and messages, in one line."""
    peaks = timeline.peak_activations
    peak = max(peaks)
    where = "every rank" if min(peaks) == peak else f"rank {peaks.index(peak)}"
    parts = [
        f"makespan {timeline.makespan:.6g} {unit}".rstrip(),
        f"bubble {timeline.bubble_ratio:.1%}",
        f"peak activations {peak:.4g} M_a ({where})",
        f"{messages_per_microbatch(schedule)} messages per micro-batch",
    ]
    if timeline.num_steps > 1:
        parts.append(f"last step {timeline.step_times[-1]:.6g}, bubble {timeline.step_bubbles[-1]:.1%}")
    return "; ".join(parts)


def summary_dict(schedule: Schedule, timeline: Timeline, inside_budget: bool | None = None) -> dict[str, Any]:
    """The sizes of a schedule and the results of its simulation, for JSON."""
    steps = ("step_times", "step_bubbles") if timeline.num_steps > 1 else ()
    result = {
        "schedule": schedule.name,
        **{name: getattr(schedule, name) for name in ("num_ranks", "num_stages", "num_microbatches", "stage_ranks")},
        "backward": backward_mode(schedule),
        **{name: getattr(timeline, name) for name in ("makespan", "bubble_ratio", "peak_activations", *steps)},
        "messages_per_microbatch": messages_per_microbatch(schedule),
    }
    return result if inside_budget is None else result | {"inside_budget": inside_budget}


def backward_mode(schedule: Schedule) -> str:
    """Whether the backward runs in one piece ("whole"), in two ("split"), both, or not at all ("none")."""
    kinds = {action.kind for row in schedule.actions for action in row}
    return " and ".join(name for kind, name in ((Kind.B, "whole"), (Kind.I, "split")) if kind in kinds) or "none"


MAX_LINES = 2000
"""of a drawing in a terminal or a pipe; what comes after them is for a picture"""


def print_timeline(timeline: Timeline, columns: int | None) -> None:
    """Print the timeline, broken into lines of `columns` characters; None: the width of the terminal, if it is one."""
    from rich.console import Console
    from rich.text import Text

    console, legs = Console(highlight=False), wave_legs(timeline)
    lines = timeline_lines(timeline, console.width if columns is None and console.is_terminal else columns)
    for line in islice(lines, MAX_LINES):
        row = Text(line.head)
        for text, span in line.pieces:
            colour = action_colour(span.action, legs) if span else None
            row.append(text, style=f"{text_colour(colour)} on {colour}" if colour else "dim")
        row.rstrip()
        console.print(row, soft_wrap=True)
    if next(lines, None) is not None:
        print(f"... cut after {MAX_LINES:,} lines; to see all: --output schedule.png, or fewer ranks or micro-batches")
    elif console.is_terminal:
        legend = Text()
        for label, colour in legend_entries([timeline]).items():
            legend.append("  ", style=f"on {colour}")
            legend.append(f" {label}   ")
        console.print(legend)

"""Compare all schedules for the same ranks, micro-batches, stages per rank and costs, the fastest first.

Wave schedules have W waves, interleaved ones 2W stages per rank. Schedules with two stages per rank are compared if
W = 1, those with one stage always. A schedule that doesn't exist in these sizes is listed with the reason. Costs per
stage are those of the schedule with the most stages; the stages of the others have sums of them.
"""

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from lightning_hanayo.cli.schedule.options import Options, add_costs, add_sizes, no_such_schedule
from lightning_hanayo.cli.schedule.show import check_output, unit_seconds
from lightning_hanayo.cli.schedule.summary import summary_dict
from lightning_hanayo.cli.tables import print_table
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.plotting import save_page, save_ranking, save_trace
from lightning_hanayo.plotting.terminal_status import showing
from lightning_hanayo.schedule import Schedule, schedule_names
from lightning_hanayo.schedule.comparison import Candidate, Comparison, compare
from lightning_hanayo.schedule.passes.communication import messages_per_microbatch


def add_options(parser: ArgumentParser) -> None:
    """Add sizes, costs and output files."""
    meaning = "schedules to compare (default: all), and tables of the same sizes"
    parser.add_argument("schedules", nargs="*", default=[], metavar="NAME|FILE.csv", help=meaning)
    add_sizes(parser)
    add_costs(parser)
    meaning = "an image, HTML page or trace to write; can be repeated"
    parser.add_argument("-o", "--output", action="append", default=[], metavar="FILE", help=meaning)


def run(options: Options) -> int:
    """Compare the schedules: print a table, and write the output files."""
    tables = {name: Schedule.from_csv(name) for name in options.schedules if name.endswith(".csv")}
    names = [name for name in options.schedules if name not in tables] or None
    for path in options.output:
        check_output(path)
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
    for path in options.output:
        with showing(f"drawing {path}"):
            _save(path, title, comparison, options)
    if options.json:
        schedules = [_result(one, budget) for one in comparison.candidates]
        print(json.dumps({"schedules": schedules, "refused": comparison.refused, "files": options.output}))
        return 0
    print(title + (f", activation budget {budget:g} M_a" if budget is not None else ""))
    _print_comparison(comparison, budget)
    for path in options.output:
        print(f"wrote {path}")
    return 0


def _result(one: Candidate, budget: float | None) -> dict[str, Any]:
    result = summary_dict(one.schedule, one.timeline)
    return result if budget is None else {**result, "inside_budget": one.within_budget}


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


def _save(path: str, title: str, comparison: Comparison, options: Options) -> None:
    timelines = {one.name: one.timeline for one in comparison.candidates}
    match Path(path).suffix.lower():
        case ".html":
            save_page(path, title, timelines, unit=options.unit)
        case ".json":
            save_trace(path, timelines, seconds=unit_seconds(options.unit))
        case _:
            save_ranking(path, comparison, title=title, budget=options.activation_budget, unit=options.unit)

"""Compare all schedules for the same ranks, micro-batches, stages per rank and costs, the fastest first.

Schedules in waves have W of them, interleaved ones 2W stages per rank; those with two stages per rank take part at
W = 1, those with one always. Whatever can't be had is listed with the reason. Costs per stage are those of the
schedule with the most stages; others add them up.
"""

from pathlib import Path
from typing import Any

from lightning_hanayo.cli.schedule.figures import figures
from lightning_hanayo.cli.schedule.options import Options, Parser, add_costs, add_json, add_sizes
from lightning_hanayo.cli.schedule.show import SECONDS, check_output
from lightning_hanayo.cli.schedule.terminal import print_json, print_table
from lightning_hanayo.errors import HanayoError, nearest
from lightning_hanayo.plotting import save_page, save_ranking, save_trace
from lightning_hanayo.schedule import schedule_names
from lightning_hanayo.schedule.simulation.comparison import Candidate, Comparison, compare, messages_per_microbatch


def add_options(parser: Parser) -> None:
    """Sizes, costs, and where to draw the comparison."""
    parser.add_argument("schedules", nargs="*", default=[], metavar="NAME", help="those to compare (default all)")
    add_sizes(parser)
    add_costs(parser)
    parser.add_argument(
        "-o", "--output", action="append", metavar="FILE", help="a picture, page or trace of all; may be given again"
    )
    add_json(parser)


def run(options: Options) -> int:
    """Compare."""
    files, names = options.output or [], options.schedules or None
    for path in files:
        check_output(path)
    for name in names or ():
        if name not in schedule_names():
            raise HanayoError(f"there is no schedule {name!r}: {nearest(name, schedule_names())}")
    sizes, budget = options.sizes, options.activation_budget
    comparison = compare(**sizes, costs=options.costs, activation_budget=budget, steps=options.steps, names=names)
    if not comparison.candidates:
        raise HanayoError("; ".join(dict.fromkeys(comparison.refused.values())))
    title = f"P = {sizes['num_ranks']}, W = {sizes['num_waves']}, B = {sizes['num_microbatches']}"
    for path in files:
        _save(path, title, comparison, options)
    if options.json:
        print_json({"schedules": [_result(one, budget) for one in comparison.candidates],
                    "refused": comparison.refused, "files": files})  # fmt: skip
        return 0
    print(title + (f", activation budget {budget:g} M_a" if budget is not None else ""))
    _print(comparison, budget)
    for path in files:
        print(f"wrote {path}")
    return 0


def _result(one: Candidate, budget: float | None) -> dict[str, Any]:
    result = figures(one.schedule, one.timeline)
    return result if budget is None else {**result, "inside_budget": one.inside}


def _print(comparison: Comparison, budget: float | None) -> None:
    columns = ["schedule", "makespan", "bubble", "activations [M_a]", "weights", "messages / micro-batch"]
    several = comparison.candidates[0].timeline.num_steps > 1
    columns += ["last step's bubble"] * several + ["in budget"] * (budget is not None)
    rows = []
    for one in comparison.candidates:
        row = [one.name, f"{one.timeline.makespan:.5g}", f"{one.timeline.bubble_ratio:.1%}", f"{one.peak:.4g}"]
        row += [f"{one.schedule.num_chains} M_w", f"{messages_per_microbatch(one.schedule):g}"]
        row += [f"{one.timeline.step_bubbles[-1]:.1%}"] * several
        rows.append(row + ["yes" if one.inside else "no"] * (budget is not None))
    print_table(columns, rows, [not one.inside for one in comparison.candidates])
    for name, reason in comparison.refused.items():
        print(f"without {name}: {reason}")


def _save(path: str, title: str, comparison: Comparison, options: Options) -> None:
    timelines = {one.name: one.timeline for one in comparison.candidates}
    match Path(path).suffix.lower():
        case ".html":
            save_page(path, title, timelines, unit=options.unit)
        case ".json":
            save_trace(path, timelines, seconds=SECONDS.get(options.unit, 1e-3))
        case _:
            save_ranking(path, comparison, title=title, budget=options.activation_budget, unit=options.unit)

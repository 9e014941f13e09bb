"""Check whether a CSV table is a valid schedule: each action once, on the rank of its stage, and no deadlock.

The table has one row per rank, with cells like 0F0, 3I2, 3W2. This reads the tables of `hanayo schedule export` and
both formats of torch.distributed.pipelining: compute_only and compute_comms, whose sends and receives are checked, too.
The exit code is 0 if the table is valid, and 2 with an error that names the cell if not.
"""

import json
from argparse import ArgumentParser

from lightning_hanayo.cli.error_messages import fail
from lightning_hanayo.cli.schedule.options import Options, add_costs
from lightning_hanayo.cli.schedule.summary import backward_mode, sizes_text, summary_dict, summary_line
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.schedule import check_csv


def add_options(parser: ArgumentParser) -> None:
    """Add the file and the costs to simulate it with."""
    parser.add_argument("file", metavar="FILE.csv", help="the table")
    add_costs(parser)


def run(options: Options) -> int:
    """Check the table, and print a summary of the schedule."""
    try:
        schedule = check_csv(options.file)
    except HanayoError as error:
        if options.json:
            print(json.dumps({"valid": False, "error": str(error)}))
        return fail(str(error))
    timeline = options.simulate(schedule)
    peak, budget = max(timeline.peak_activations), options.activation_budget
    exceeds_budget = budget is not None and peak > budget + 1e-9
    if options.json:
        within = {} if budget is None else {"inside_budget": not exceeds_budget}
        print(json.dumps({"valid": True, **within, **summary_dict(schedule, timeline)}))
    else:
        print(f"{options.file} is a schedule: {sizes_text(schedule)}, backward {backward_mode(schedule)}")
        print(summary_line(schedule, timeline, options.unit))
    if exceeds_budget:
        return fail(f"{options.file} holds {peak:g} M_a of activations, more than --activation-budget {budget:g}")
    return 0

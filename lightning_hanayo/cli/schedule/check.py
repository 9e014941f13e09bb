"""Check whether a CSV table is a schedule: every action once, on its stage's rank, and nobody waits in a ring.

Reads a row per rank with cells like 0F0, 3I2, 3W2: ours and both formats of torch.distributed.pipelining,
compute_only and compute_comms, whose sends and receives are checked too. Ends with exit code 0 and the table's
figures, or with 2 and what is wrong where.
"""

from lightning_hanayo.cli.failure import fail
from lightning_hanayo.cli.schedule.figures import backward, figures, sentence
from lightning_hanayo.cli.schedule.options import Options, Parser, add_costs, add_json, describe
from lightning_hanayo.cli.schedule.terminal import print_json
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.text.csv_table import check_csv


def add_options(parser: Parser) -> None:
    """A file, and the costs for its figures."""
    parser.add_argument("file", metavar="FILE.csv", help="the table")
    add_costs(parser)
    add_json(parser)


def run(options: Options) -> int:
    """Check."""
    try:
        schedule = check_csv(options.file)
    except HanayoError as error:
        if options.json:
            print_json({"valid": False, "error": str(error)})
        return fail(str(error))
    timeline = options.simulate(schedule)
    peak, budget = max(timeline.peak_activations), options.activation_budget
    over = budget is not None and peak > budget + 1e-9
    if options.json:
        inside = {} if budget is None else {"inside_budget": not over}
        print_json({"valid": True, **inside, **figures(schedule, timeline)})
    else:
        print(f"{options.file} is a schedule: {describe(schedule)}, backward {backward(schedule)}")
        print(sentence(schedule, timeline, options.unit))
    if over:
        return fail(f"{options.file} holds {peak:g} M_a of activations, more than --activation-budget {budget:g}")
    return 0

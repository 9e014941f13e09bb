"""Compare two checkpoints: names, shapes, dtypes and values of tensors, and all other values.

Each is a checkpoint folder or a plain file, of any layout. The largest difference of each tensor is shown, and which
one differs first. A plain file numbers the parameters of optimizers: the names of the other checkpoint are used.

Exit codes: 0 equal, 1 different or not whole, 2 if there is no such path.
"""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from lightning_hanayo.checkpoint.found import existing
from lightning_hanayo.cli.error_messages import fail
from lightning_hanayo.cli.tables import print_table
from lightning_hanayo.errors import CheckpointError
from lightning_hanayo.plotting.terminal_status import showing


def add_options(parser: ArgumentParser) -> None:
    """Add the checkpoints, and how much to show."""
    parser.add_argument("first", metavar="A", help="a checkpoint folder or a plain file")
    parser.add_argument("second", metavar="B", help="another one")
    parser.add_argument("-n", "--rows", type=int, default=20, metavar="N", help="differences to show (default: 20)")
    parser.add_argument("--model", action="store_true", help="compare the model's tensors alone")


def run(options: Namespace) -> int:
    """Compare the two, and show what differs."""
    from lightning_hanayo.checkpoint.convert.compare import compare  # torch: seconds, which --help needn't wait for

    try:
        first, second = existing(options.first), existing(options.second)
        with showing(f"comparing {first} with {second}"):
            found = compare(first, second, model_only=options.model)
    except CheckpointError as error:
        fail(str(error))
        return 1
    differences = [one for one in found if one.what]
    if options.json:
        print(
            json.dumps(
                {"equal": not differences, "compared": len(found), "differences": list(map(asdict, differences))}
            )
        )
        return int(bool(differences))
    if not differences:
        print(f"equal: {len(found)} tensors and values")
        return 0
    print(f"{len(differences)} of {len(found)} tensors and values differ, first {differences[0].name}")
    rows = [[one.name, one.what, "" if one.largest is None else f"{one.largest:.3g}"] for one in differences]
    print_table(["name", "difference", "largest"], rows[: max(0, options.rows)])
    if len(rows) > options.rows:
        print(f"and {len(rows) - options.rows} more (--rows)")
    return 1

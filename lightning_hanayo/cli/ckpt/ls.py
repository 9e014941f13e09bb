"""List the checkpoints in a folder and below it: step, epoch, size, layout, and whether they are whole.

Only names, sizes and manifests are read; `hanayo ckpt verify` reads every byte. What interrupted saves have left is
listed, too.

Exit codes: 0, 1 if a checkpoint isn't whole, 2 if there is no such folder.
"""

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict

from lightning_hanayo.checkpoint.found import Found, look_into
from lightning_hanayo.checkpoint.save.problems import size_text
from lightning_hanayo.cli.tables import print_table


def add_options(parser: ArgumentParser) -> None:
    """Add the folder."""
    parser.add_argument("folder", nargs="?", default=".", metavar="FOLDER", help="a path or an fsspec URL (default: .)")


def run(options: Namespace) -> int:
    """List what is there."""
    found = look_into(options.folder)
    if options.json:
        print(json.dumps([asdict(one) for one in found]))
    elif found:
        columns = ["checkpoint", "step", "epoch", "size", "kind", "layout"]
        print_table(columns, [_row(one) for one in found], [bool(one.problem) for one in found])
        for one in found:
            if one.problem:
                print(f"{one.path}: {one.problem}")
    else:
        print(f"no checkpoints in {options.folder}")
    return int(any(one.kind == "incomplete" for one in found))


def _row(one: Found) -> list[str]:
    numbers = ["" if number is None else str(number) for number in (one.step, one.epoch)]
    return [one.path, *numbers, size_text(one.num_bytes), one.kind, one.layout]

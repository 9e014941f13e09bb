"""Find the fastest layout of a model on so many devices: data, pipeline and cube ranks, waves, micro-batches.

Reads the configuration of `hanayo fit`, counts what the model computes without giving it values, and predicts for all
layouts the time of an optimizer step and the memory. Prints the fastest that fit, and writes a configuration that
`hanayo fit --config recipe.yaml --config plan.yaml` runs, and a picture. No process is started, and no device is used.

Exit codes: 0, 2 bad arguments, or no layout fits: then it says what is missing.
"""

import gc
from collections.abc import Sequence
from functools import partial

from lightning_hanayo.cli.common import OTHERS, CommandParser, quantity, whole_number
from lightning_hanayo.cli.trainer_start import check_configuration
from lightning_hanayo.planner.machine import KNOWN

_UNITS = {"": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def run(argv: Sequence[str]) -> int:
    """Plan what the configuration in `argv` describes, and return the exit code."""
    options, rest = _parser().parse_known_args(argv[1:])
    check_configuration("plan", rest)
    gc.disable()  # imports and layouts make millions of objects that stay, and looking through them takes long
    try:
        from lightning_hanayo.cli.plan_cli import run_plan  # Lightning: seconds, which --help needn't wait for

        return run_plan(options, rest)
    finally:
        gc.enable()


def _parser() -> CommandParser:
    usage = "hanayo plan --config recipe.yaml --devices N (--device NAME | --machine FILE) [options] "
    parser = CommandParser("hanayo plan", __doc__, usage=f"{usage}[options of hanayo fit]", epilog=OTHERS)
    add, to_bytes = parser.add_argument, partial(quantity, units=_UNITS, expected="bytes, such as 80GB or 40GiB")
    add("--devices", type=whole_number, metavar="N", required=True, help="devices of all nodes")
    add("--nodes", type=whole_number, default=1, metavar="N", help="nodes (default: 1)")
    machine = parser.add_mutually_exclusive_group(required=True)
    machine.add_argument("--device", metavar="NAME", help=f"rates of a data sheet, or nominal ones: {', '.join(KNOWN)}")
    machine.add_argument("--machine", metavar="FILE", help="measured rates, as hanayo doctor --measure writes them")
    meaning = "that a rank may need, such as 80GB (default: 0.9 of a device's)"
    add("--memory", type=to_bytes, metavar="SIZE", help=meaning)
    given = parser.add_mutually_exclusive_group()
    meaning = "samples per optimizer step (default: the configuration's)"
    given.add_argument("--global-batch", type=whole_number, metavar="N", help=meaning)
    meaning = "choose nothing: print the time and each rank's memory of the layout that the configuration has"
    given.add_argument("--given", action="store_true", help=meaning)
    add("--profile", metavar="FILE", help="measured times of blocks: the profile.json of a run with this model")
    meaning = "how often a cube gathers its weights (default: what is faster and fits)"
    add("--cube-weights", choices=("auto", "microbatch", "batch"), default="auto", help=meaning)
    meaning = "whether a cube's ranks work on two micro-batches at once (default: what is faster and fits)"
    add("--pairs", choices=("auto", "on", "off"), default="auto", help=meaning)
    meaning = "how many layouts to show, each of another pipeline size or cube (default: 5)"
    add("--top", type=whole_number, default=5, metavar="N", help=meaning)
    add("--output", default="plan.yaml", metavar="FILE", help="the configuration to write (default: plan.yaml)")
    meaning = "time over memory of all layouts: an image, or a page (.html) that names them (default: plan.png)"
    add("--picture", metavar="FILE", help=meaning)
    add("--json", action="store_true", help="print everything as JSON")
    return parser

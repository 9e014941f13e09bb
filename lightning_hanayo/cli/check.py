"""Check that a training is the same on its layout as in one process.

Reads the configuration of `hanayo fit`, trains a few steps on CPUs in one process and on the layout, compares losses,
gradients, weights, buffers and logged values, and names the first that differs.

Exit codes: 0 exact, 1 not exact (or refused by the strategy), 2 bad arguments.
"""

from collections.abc import Sequence

from lightning_hanayo.cli.common import OTHERS, CommandParser
from lightning_hanayo.cli.trainer_start import check_configuration

_DTYPES = ("float64", "float32")


def run(argv: Sequence[str]) -> int:
    """Check the configuration that `argv` gives, and return the exit code."""
    options, rest = _parser().parse_known_args(argv[1:])
    check_configuration("check", rest)
    from lightning_hanayo.cli.check_cli import run_check  # Lightning: seconds, which --help needn't wait for

    return run_check(options, rest)


def _parser() -> CommandParser:
    usage = "hanayo check --config recipe.yaml [options] [options of hanayo fit]"
    parser = CommandParser("hanayo check", __doc__, usage=usage, epilog=OTHERS)
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps (default: 2)")
    parser.add_argument("--depth", type=int, metavar="N", help="keep the first N blocks only; each stage needs one")
    parser.add_argument("--dtype", choices=_DTYPES, default="float64", help="precision (default: float64)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds per run (default: 600)")
    meaning = "exit with 0 if the layout is exact and only micro-batches make a difference"
    parser.add_argument("--accept-microbatches", action="store_true", help=meaning)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser

"""The command line that all benchmarks share: common arguments, output files, exit codes, a description of the machine.

findings --> print the table; write --json, --table and pictures --> 0        wrong arguments: 2, interrupted: 130
"""

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_hanayo.errors import HanayoError

LOOPBACK = "gloo over loopback, processes on one machine"


@dataclass(frozen=True)
class Findings:
    """The results of a benchmark.

    Args:
        text: the tables, as Markdown.
        data: all figures, for JSON.
        pictures: for each picture option the function that draws the file.
        code: the exit code.
    """

    text: str
    data: Mapping[str, Any]
    pictures: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    code: int = 0


def new_parser(name: str, about: str | None, **pictures: str) -> argparse.ArgumentParser:
    """The parser of `recipes.benchmarks.<name>`, with its file options. `pictures` maps an option to its help."""
    parser = argparse.ArgumentParser(prog=f"python -m recipes.benchmarks.{name}", description=about,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    files = parser.add_argument_group("files")
    files.add_argument("--json", type=Path, metavar="FILE", help="write all figures")
    files.add_argument("--table", type=Path, metavar="FILE.md", help="write the printed table")
    for option, what in pictures.items():
        files.add_argument(f"--{option}", type=Path, metavar="FILE.png", help=what)
    return parser


def whole(text: str) -> int:
    """Parse an integer that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value


def numeric(text: str) -> float:
    """Parse a number that is at least 0."""
    value = float(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 0")
    return value


def run(measure: Callable[[argparse.Namespace], Findings], options: argparse.Namespace) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    try:
        found = measure(options)
    except HanayoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; all processes have ended", file=sys.stderr)
        return 130
    print(found.text)
    if options.json:
        options.json.write_text(json.dumps(found.data, indent=1) + "\n")
    if options.table:
        options.table.write_text(found.text)
    for option, draw in found.pictures.items():
        if path := getattr(options, option):
            draw(path)
    return found.code


def run_on_cluster(measure: Callable[[argparse.Namespace], Findings], options: argparse.Namespace) -> int:
    """The same on emulated hosts, which SIGTERM removes, too. Returns 3, with a line, where there can be none."""
    from recipes.benchmarks.cluster import refusal

    if why := refusal():
        print(f"skipped: {why}", file=sys.stderr)
        return 3
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        return run(measure, options)
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def describe(configuration: str, *notes: str) -> list[str]:
    """Describe the machine, the configuration, and the load of other programs."""
    import torch

    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return [
        f"{time.strftime('%Y-%m-%d %H:%M')}, {platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        f"torch {torch.__version__}, Python {platform.python_version()}, {configuration}",
        "; ".join((*notes, f"load average at the end {load}")),
    ]

"""Look at what a run depends on: versions, devices, host, disk, network, variables, and links between ranks.

With --devices N it starts N processes on this host and measures latency and bandwidth between them; under torchrun or
srun it measures between the ranks that those have started. With --measure it also measures products, memory and the
host's calls, and writes all of it for `hanayo plan`. With --config it checks what `hanayo fit` would run, too.

Exit codes: 0, 1 if something would make a run fail, 2 bad arguments.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING

from lightning_hanayo.cli.common import CommandParser, number, quantity
from lightning_hanayo.cli.doctor.host import Finding, exit_code
from lightning_hanayo.errors import is_rank_zero

if TYPE_CHECKING:
    from lightning_hanayo.cli.doctor.links import Measured

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def run(argv: Sequence[str]) -> int:
    """Look, print, and return the exit code."""
    options, rest = _parser().parse_known_args(argv[1:])
    findings = _examine(options, rest)
    try:
        if is_rank_zero(os.environ):
            _print(findings, as_json=options.json)
    except BrokenPipeError:  # the reader of the output has closed the pipe, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code(findings)


def _parser() -> CommandParser:
    usage = "hanayo doctor [--devices N] [--measure] [--json] [--config recipe.yaml [options of hanayo fit]]"
    parser = CommandParser("hanayo doctor", __doc__, usage=usage)
    processes = number(lambda value: value >= 2, "2 or more processes, which send to each other", int)
    parser.add_argument("--devices", type=processes, metavar="N", help="measure links between N processes of this host")
    parser.add_argument("--root", metavar="FOLDER", help="where checkpoints go (default: that of --config, or here)")
    seconds = partial(quantity, units={"": 1.0}, expected="more than 0 seconds")
    parser.add_argument("--timeout", type=seconds, default=120.0, metavar="S", help="seconds to measure (default: 120)")
    parser.add_argument("--measure", action="store_true", help="measure products and memory, too, and write the file")
    parser.add_argument("--output", default="machine.json", metavar="FILE", help="to write (default: machine.json)")
    meaning = "between nodes, if one is measured: 50GB/s or 400Gbit/s"
    parser.add_argument("--network", type=speed, metavar="SPEED", help=meaning)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    return parser


_SPEEDS = {
    f"{prefix}{unit}{per}": factor * size
    for prefix, factor in {"M": 1e6, "G": 1e9}.items()
    for unit, size in {"B": 1.0, "BIT": 1 / 8}.items()
    for per in ("", "/S")
}


speed = partial(quantity, units=_SPEEDS, expected="bytes or bits per second, such as 50GB/s or 400Gbit/s")
"""the type of an option: bytes per second"""


def _examine(options: argparse.Namespace, rest: list[str]) -> list[Finding]:
    """What was found."""
    from lightning_hanayo.cli.doctor import host
    from lightning_hanayo.cli.doctor.links import place

    findings = [*host.examine_versions(), *host.examine_devices(host.look_at_devices()), *host.examine_host()]
    root, of_run = ".", list[Finding]()
    if rest:
        from lightning_hanayo.cli.doctor import recipe  # Lightning: seconds, which the rest needn't wait for

        root, of_run = recipe.examine(rest)
    findings += host.examine_disk(options.root or root)
    findings += host.examine_network()
    findings += host.examine_environment(is_rank=place() is not None)
    findings += of_run
    measured, links = _links(options, findings)
    if options.measure and is_rank_zero(os.environ):
        from lightning_hanayo.cli.doctor.measure import examine, measure
        from lightning_hanayo.plotting.terminal_status import showing

        with showing("measuring") as say:
            machine = measure(measured, network=options.network, say=say)
        machine.save(options.output)
        links += examine(machine, options.output)
    return [*findings, *links]


def _links(options: argparse.Namespace, findings: Sequence[Finding]) -> tuple["Measured | None", list[Finding]]:
    """What was measured, and what is said of it."""
    from lightning_hanayo.cli.doctor.links import Measured, examine, measure_given, measure_here, place

    given = place()
    if given is not None and given[1] > 1:
        found: Measured | Finding = measure_given(*given, findings)
    elif options.devices is not None:
        found = measure_here(options.devices, options.timeout)
    else:
        return None, []
    if isinstance(found, Finding):
        return None, [found]
    other = []
    for host in dict.fromkeys(found.hosts if found.given else ()):
        for one in found.given[found.hosts.index(host)] or ():  # of its first rank
            # what isn't well on another host, and versions and devices that aren't those of this one
            if one not in findings and (one.level != "ok" or one.topic in ("versions", "devices")):
                other.append(replace(one, topic=f"on {host}", name=f"{one.topic}: {one.name}"))
    return found, [*other, *examine(found)]


def _print(findings: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
        return
    width = max(len(finding.name) for finding in findings)
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            print(f"{os.linesep if topic else ''}{finding.topic}")
            topic = finding.topic
        print(f"  {_MARKS[finding.level]:<8}{finding.name:<{width}}  {finding.value}")
        if finding.advice:
            print(f"  {'':<8}{'':<{width}}  -> {finding.advice}")
    problems = sum(finding.level == "problem" for finding in findings)
    notes = sum(finding.level == "note" for finding in findings)
    print(f"\nproblems: {problems}, notes: {notes}")
    sys.stdout.flush()

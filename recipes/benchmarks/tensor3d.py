"""The tensor-parallel benchmark: 1-D, 2-D and 3-D side by side, on a cluster of emulated hosts with a set bandwidth.

python -m recipes.benchmarks.tensor3d --table tensor3d.md --picture tensor3d.png --trace tensor3d-trace.png
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from recipes.benchmarks.cluster import Cluster, Link, checked
from recipes.benchmarks.harness import Findings, describe, new_parser, number, run_on_cluster
from recipes.benchmarks.schemes.names import ONE_D, TWO_D, mesh_of, three_d

if TYPE_CHECKING:
    from recipes.benchmarks.tensor3d_rank import Case

HOSTS, SHARE, TIMEOUT_S = 8, 0.7, 1200.0
PIECES = 4
COLLECTIVES = (2, 2.0), (4, 2.0), (8, 2.0), (8, 8.0)
PARTS = ("collectives", "shapes", "overlap", "two-d", "scaling")
MESHES = (2, 2, 2), (4, 2, 1), (8, 1, 1)
CHECKED = (
    *((name, HOSTS) for name in (*ONE_D, *map(three_d, MESHES), three_d(MESHES[0], PIECES))),
    (TWO_D, 4),
    (three_d((2, 2, 1)), 4),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table, write what was asked for. Returns the exit code: 3 where there can be no cluster."""
    parser = new_parser("tensor3d", __doc__, picture="draw steps, measured next to predicted",
                        trace="draw each host's computing and receiving")  # fmt: skip
    number(parser, "--mbit", 200.0, "each host's bandwidth, each way, in megabits per second")
    number(parser, "--hidden", 384, "of the largest layers")
    number(parser, "--rounds", 5, "each scheme once in each; other shapes take three")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                        help=f"of {', '.join(PARTS)} (default: all)")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="instead: compute small layers for real, and compare")
    options = parser.parse_args(arguments)
    return run_on_cluster(_check if options.check else _measure, options)


def speed_of(link: Link, tokens: int, hidden: int, layers: int = 2) -> float:
    """A host's flops per second, so that 1-D on eight of them would compute for 0.3 of a step without overlap."""
    from recipes.benchmarks.tensor3d_rank import Case
    from recipes.benchmarks.tensor3d_report import predict

    alone, _ = predict(Case("", HOSTS, tokens, hidden, (ONE_D[0],), 1.0, layers), ONE_D[0], link)
    return alone.computing * SHARE / (1 - SHARE) / alone.receiving


def cases(link: Link, hidden: int, rounds: int, parts: Sequence[str]) -> list["Case"]:
    """All of them: for each shape, the cube and the meshes that move the least."""
    from recipes.benchmarks.tensor3d_rank import Case

    small = 2 * hidden // 3 // 8 * 8
    found = []
    if "shapes" in parts:
        for tokens, width, times in ((8 * hidden, hidden, rounds), (2 * hidden, hidden, 3), (8 * small, small, 3)):
            best, *weights_only = _best(HOSTS, tokens, width)
            in_pieces = [three_d(mesh_of(name), PIECES) for name in (three_d((1, HOSTS, 1)), three_d((2, 2, 2)), best)]
            names = (*ONE_D, in_pieces[0], three_d((2, 2, 2)), in_pieces[1], best, in_pieces[2], *weights_only)
            speed = speed_of(link, tokens, width)
            found.append(Case("shapes", HOSTS, tokens, width, names, speed, rounds=times))
    if "overlap" in parts:
        names, speed = tuple(_best(HOSTS, 16 * small, small)), speed_of(link, 16 * small, small)
        found.append(Case("overlap", HOSTS, 16 * small, small, names, speed, layers=4))
    speed = speed_of(link, 8 * small, small)
    if "two-d" in parts:
        names = (*ONE_D, TWO_D, *_best(4, 8 * small, small))
        found.append(Case("two-d", 4, 8 * small, small, names, speed))
    if "scaling" in parts:
        for hosts in (1, 2, 4, 8):
            for title, tokens in (("strong", 8 * small), ("weak", small * hosts)):
                names = (ONE_D[0], _best(hosts, tokens, small)[0])
                found.append(Case(title, hosts, tokens, small, names, speed, layers=1))
    return found


def _best(hosts: int, tokens: int, hidden: int) -> list[str]:
    """The mesh that moves the least, and the one that moves weights only, which the most compute can hide."""
    from lightning_hanayo.planner.candidates import ranked_meshes
    from lightning_hanayo.planner.communication_volume import TransformerLayer

    first = ranked_meshes(hosts, TransformerLayer(tokens, hidden, heads=hidden))[0]
    return list(dict.fromkeys([three_d(first), three_d((hosts, 1, 1))]))


def _check(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks.tensor3d_rank import check_all

    with Cluster(HOSTS, Link(options.mbit)) as cluster:
        found = cluster.run(check_all, CHECKED, TIMEOUT_S)
    return checked({name: max(host[name] for host in found if name in host) for name in found[0]})


def _measure(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks import tensor3d_report as report
    from recipes.benchmarks.tensor3d_rank import Plan, work
    from recipes.benchmarks.tensor3d_report import outcome_of, transfers_of

    link = Link(options.mbit)
    plan = Plan(
        tuple(cases(link, options.hidden, options.rounds, options.parts)),
        COLLECTIVES if "collectives" in options.parts else (),
    )
    begin = time.monotonic()
    with Cluster(HOSTS, link) as cluster:
        records = cluster.run(work, plan, TIMEOUT_S)
    took = time.monotonic() - begin
    outcomes = [
        outcome_of(case, link, [record.steps[place] for record in records[: case.hosts]])
        for place, case in enumerate(plan.cases)
    ]
    transfers = transfers_of(link, records)
    far = report.far_ahead(link)
    about = describe(link.about(HOSTS), f"{took:.0f} s in all")
    data = {"machine": about, "transfers": [vars(one) for one in transfers],
            "cases": [asdict(one) for one in outcomes], "at 64 hosts": [asdict(one) for one in far]}  # fmt: skip
    pictures = {
        "picture": lambda path: report.draw(outcomes, path),
        "trace": lambda path: report.draw_trace(plan, records, link, path),
    }
    return Findings(report.text(about, transfers, outcomes, far), data, pictures)


if __name__ == "__main__":
    sys.exit(main())

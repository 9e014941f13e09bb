"""Measures the host time of one block: as it is, with torch's tensor parallelism (DTensor), and in a cube.

python -m recipes.benchmarks.cube_host --table cube_host.md
"""

import argparse
import os
import sys
from collections.abc import Sequence

from recipes.benchmarks.harness import Findings, describe, new_parser, run, whole

READING = """\
A Llama block of Hugging Face with tensors so small that arithmetic costs nothing: the CPU time is what the host spends
on Python, on autograd and on torch's calls. torch's fake process group stands for 8 ranks; its collectives return at
once, and the layers take the branch that they take on NCCL. All candidates run in turn in one process, and each figure
is a median over the rounds. Calls are those that reach torch's dispatcher; "to DTensor" compares with
`parallelize_module` (column- and row-parallel layers, norms over the sequence) on 8 ranks.

    python -m recipes.benchmarks.cube_host --compile inductor --table docs/benchmarks/cube_host.md"""

HEADER = """\
| block | forward us | backward us | to plain | to DTensor | calls forward | backward | collectives forward | backward |
|---|---:|---:|---:|---:|---:|---:|---:|---:|"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    parser = new_parser("cube_host", __doc__)
    parser.add_argument("--rounds", type=whole, default=21, metavar="N", help="the median is shown (default 21)")
    parser.add_argument("--calls", type=whole, default=20, metavar="N", help="steps per round (default 20)")
    parser.add_argument("--heads", type=whole, default=8, metavar="N", help="of k and v; q has 8 (default 8)")
    parser.add_argument("--compile", metavar="BACKEND", help='measure compiled blocks, too: "inductor" (default: none)')
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, which reads it once
    from recipes.benchmarks.host_time import measure

    found = measure(options.rounds, options.calls, options.heads, options.compile)
    plain, other = (found[name].step.median for name in ("plain", "DTensor"))
    rows = [
        f"| {name} | {one.forward.median:.0f} | {one.backward.median:.0f} | {one.step.median / plain:.2f} | "
        f"{one.step.median / other:.2f} | {' | '.join(map(str, (*(one.calls or '--'), *(one.collectives or '--'))))} |"
        for name, one in found.items()
    ]
    machine = describe("CPU, 1 thread, fake process group of 8 ranks")
    head = ["# Host time of a block", "", *(f"- {line}" for line in machine), ""]
    data = {"machine": machine, "blocks": {name: one.plain() for name, one in found.items()}}
    return Findings("\n".join([*head, HEADER, *rows, "", READING, ""]), data)


if __name__ == "__main__":
    sys.exit(main())

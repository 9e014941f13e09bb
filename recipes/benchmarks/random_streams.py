"""Measures what keyed random numbers cost: the time to begin a stream, and for comparison a block's forward.

python -m recipes.benchmarks.random_streams --table random_streams.md
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from recipes.benchmarks.harness import Findings, describe, new_parser, run, whole

READING = """\
A rank begins a stream before each backward, before the step's own code, and before each block. When the step's own
code calls a block, its stream is saved and continues after the block. A batch saves torch's generators at its start
and restores them at its end.

    python -m recipes.benchmarks.random_streams --table docs/benchmarks/random_streams.md"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    parser = new_parser("random_streams", __doc__)
    parser.add_argument("--rounds", type=whole, default=9, metavar="N", help="the median is shown (default 9)")
    parser.add_argument("--calls", type=whole, default=2000, metavar="N", help="calls per round (default 2000)")
    parser.add_argument("--device", default="cpu", help="the model's device (default cpu)")
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, which reads it once
    import torch

    from recipes.benchmarks.harness import Summary

    machine = describe(f"{options.device}, threads: {torch.get_num_threads()}")
    found = {name: Summary.of(_times(call, options)) for name, call in _cases(torch.device(options.device)).items()}
    rows = [f"| {name} | {us.median:.1f} | {us.least:.1f}-{us.most:.1f} |" for name, us in found.items()]
    head = ["# Keyed random numbers", "", *(f"- {line}" for line in machine), ""]
    table = ["| what | microseconds | min-max |", "|---|---:|---:|", *rows]
    figures = {name: {"us": us.median, "least": us.least, "most": us.most} for name, us in found.items()}
    return Findings("\n".join([*head, *table, "", READING, ""]), {"machine": machine, "cases": figures})


def _cases(device: Any) -> dict[str, Callable[[], object]]:
    import torch

    from lightning_hanayo.pipeline_parallel.rng import RandomStreams
    from lightning_hanayo.schedule import Kind
    from recipes.gpt.module import Block

    streams = RandomStreams(0, 0, device)
    batch = streams.batch("train 0 0")
    batch.__enter__()  # the process ends with it
    streams.begin_action(0, Kind.F)
    block, x = Block(128, 4, 0.0).to(device), torch.randn(1, 128, 128, device=device)

    def in_code() -> None:
        with streams.block(3):
            pass

    def a_batch() -> None:
        with RandomStreams(0, 0, device).batch("train 0 0"):
            pass

    @torch.no_grad()
    def forward() -> None:
        block(x)
        if device.type == "cuda":
            torch.cuda.synchronize()

    return {
        "a forward": lambda: streams.begin_action(1, Kind.F),
        "a backward": lambda: streams.begin_action(1, Kind.B),
        "the step's own code": lambda: streams.begin_user_code(1),
        "a block of a stage": lambda: streams.begin_block(3),
        "a block in the step's own code": in_code,
        "a batch": a_batch,
        "for comparison: a block's forward, 128 tokens of width 128": forward,
    }


def _times(call: Callable[[], object], options: argparse.Namespace) -> list[float]:
    """Microseconds per call, one value per round."""
    found = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        for _ in range(options.calls):
            call()
        found.append((time.perf_counter() - start) / options.calls * 1e6)
    return found


if __name__ == "__main__":
    sys.exit(main())

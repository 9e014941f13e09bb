"""Measures what keyed random numbers cost: the time to begin a stream, and for comparison a block's forward.

python -m recipes.benchmarks.random_streams --table random_streams.md
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch

from lightning_hanayo.pipeline_parallel.rng import RandomStreams
from lightning_hanayo.schedule import Kind
from recipes.benchmarks.harness import Columns, Findings, Summary, describe, new_parser, number, page, run, span, table
from recipes.gpt.module import Block

READING = """\
A rank begins a stream before each backward, before the step's own code, and before each block. When the step's own
code calls a block, its stream is saved and continues after the block. A batch saves torch's generators at its start
and restores them at its end.

    python -m recipes.benchmarks.random_streams --table docs/benchmarks/random_streams.md"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    parser = new_parser("random_streams", __doc__)
    number(parser, "--rounds", 9, "the median is shown")
    number(parser, "--calls", 2000, "calls per round")
    parser.add_argument("--device", default="cpu", help="the model's device (default cpu)")
    return run(_measure, parser.parse_args(arguments))


COLUMNS: Columns = (
    ("what", lambda one: one[0]),
    ("microseconds", lambda one: f"{one[1].median:.1f}"),
    ("min-max", lambda one: span(one[1], 1, 1)),
)


def _measure(options: argparse.Namespace) -> Findings:
    torch.set_num_threads(1)
    machine = describe(f"{options.device}, threads: {torch.get_num_threads()}")
    found = {name: Summary.of(_times(call, options)) for name, call in _cases(torch.device(options.device)).items()}
    text = page("# Keyed random numbers", machine, table(COLUMNS, found.items()), READING)
    figures = {name: {"us": us.median, "least": us.least, "most": us.most} for name, us in found.items()}
    return Findings(text, {"machine": machine, "cases": figures})


def _cases(device: torch.device) -> dict[str, Callable[[], object]]:
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

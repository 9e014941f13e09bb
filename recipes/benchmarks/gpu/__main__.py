"""Measures the strategy on one GPU: steps, the host's work, memory of sent outputs, products while others
spin, two micro-batches at once.

python -m recipes.benchmarks.gpu --json gpu.json --table gpu.md --picture gpu.png
python -m recipes.benchmarks.gpu --parts llama host
python -m recipes.benchmarks.gpu --toy              # the same program in seconds, on a CPU too
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.benchmarks.harness import Findings, describe, new_parser, number, read, run, stored

if TYPE_CHECKING:
    from recipes.benchmarks.gpu.parts import Figures

PARTS = ("products", "memory", "pairs", "llama", "gpt", "host")
"""in the order in which they run: the quick ones first"""
PRECISIONS = ("bf16-true", "bf16-mixed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the requested files. Returns the exit code."""
    return run(_measure, _parser().parse_args(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("gpu", __doc__, picture="draw speeds, the host's work and the products")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    number(parser, "--rounds", 5, "the median is shown")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help="(default bf16-true)")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, which also run on a CPU: for trying it out")
    parser.add_argument("--eager", action="store_true", help="leave out compiled blocks, which take minutes to compile")
    parser.add_argument("--again", type=Path, metavar="FILE.json", help="measure nothing: format the figures in it")
    return parser


def _measure(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks.gpu import report
    from recipes.benchmarks.gpu.parts import Figures

    figures = stored(options.again, partial(read, Figures)) if options.again else _figures(options)
    return Findings(report.text(figures), figures.plain(), {"picture": lambda path: report.draw(figures, path)})


def _figures(options: argparse.Namespace) -> "Figures":
    from recipes.benchmarks.gpu import parts
    from recipes.benchmarks.gpu.card import find_card
    from recipes.benchmarks.gpu.steps import Rounds

    card = find_card(toy=options.toy)
    _say(card.about)
    scale = parts.TOY if options.toy else parts.FULL
    measuring = parts.Run(card, scale, Rounds(options.rounds), options.eager, options.precision, _say)
    sizes = "toy sizes, which say nothing about the device" if options.toy else f"parts: {' '.join(options.parts)}"
    note = f"{options.precision}; {sizes}"

    def keep(figures: "Figures") -> None:
        figures.machine = describe(card.about, note)
        if options.json:
            options.json.write_text(json.dumps(figures.plain()))

    return measuring.measure([part for part in PARTS if part in options.parts], keep)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

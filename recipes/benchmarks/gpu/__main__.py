"""Measures the strategy on one GPU: steps, the host's work, memory of sent outputs, products while others
spin, two micro-batches at once.

python -m recipes.benchmarks.gpu --json gpu.json --table gpu.md --picture gpu.png
python -m recipes.benchmarks.gpu --parts llama host
python -m recipes.benchmarks.gpu --toy              # the same program in seconds, on a CPU too
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.benchmarks.gpu.card import find_card
from recipes.benchmarks.gpu.models import ALL, COMPILED, EAGER, MICROBATCHES
from recipes.benchmarks.gpu.parts import FULL, PARTS, TOY, Figures, Run
from recipes.benchmarks.gpu.steps import CaseFigures, Rounds, StepFigures, largest_difference
from recipes.benchmarks.harness import (
    Columns,
    Findings,
    describe,
    ms,
    new_parser,
    number,
    page,
    read,
    run,
    span,
    stored,
    table,
)
from recipes.paper.figure import BLUE, GREEN, GREY, ORANGE, RED, new, plain, save
from recipes.paper.page import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "# One GPU"
NAMES = {"llama": "Llama blocks", "gpt": "GPT"}
COLOURS = dict(zip((one.label for one in ALL), (GREY, GREEN, BLUE, ORANGE) * 2, strict=True))
READING = f"""\
All candidates train the same model on the same {MICROBATCHES} micro-batches per step, each in its own fit,
and their steps run in turn. The plain Trainer accumulates the micro-batches' gradients. An action is the forward
or the backward of one block; with P=1 the stack is one stage, with W=2 each block is. Kernels and microseconds are
those of a whole step, divided by its actions. "of plain" is the speed compared with the plain Trainer's in the same
round, compiled if the candidate is. TFLOP/s count six operations per token and weight of a matrix, and 6 seq width per
token and block for causal attention; the peak is that of NVIDIA's data sheet, without sparsity."""
HOST = """\
The same models, so narrow that the GPU waits for the host: a step's time is the host's work."""
MEMORY = """\
A stage with micro-batches in flight: the peak with every sent output kept, and with each dropped once it is sent.
"saved" is the difference in outputs per micro-batch: 1 if the stage itself holds none of them."""
PAIRS = """\
What a further micro-batch adds on one device. A stream that waits emulates its collectives: one for each block's
forward, one for its backward. "one by one" and "F+B" are multiples of max(compute, link), the least that is
possible."""
PRODUCTS = """\
Matrix products while thread blocks of another kernel spin, as those of a waiting receive do: what a limit on a
communicator's CTAs saves."""


STEP_COLUMNS: Columns = (
    ("", lambda one: one.label),
    ("step ms", lambda one: ms(one.step.median, 2)),
    ("min-max", lambda one: span(one.step, 2)),
    ("TFLOP/s", lambda one: f"{one.teraflops:.1f}"),
    ("of peak", lambda one: "-" if one.of_peak is None else percent(one.of_peak)),
    ("of plain", lambda one: f"{one.of_plain.median:.3f}"),
    ("min-max", lambda one: span(one.of_plain, 3, 1)),
    ("kernels/action", lambda one: f"{one.kernels:.1f}"),
    ("us/action", lambda one: f"{one.microseconds:.0f}"),
)
HOST_COLUMNS: Columns = (
    ("", lambda one: one.label),
    ("us/action", lambda one: f"{one.microseconds:.0f}"),
    ("min-max", lambda one: span(one.step, 0, one.microseconds / one.step.median)),
    ("CPU us/action", lambda one: f"{one.cpu * one.microseconds / one.step.median:.0f}"),
    ("of plain", lambda one: f"{one.of_plain.median:.3f}"),
    ("kernels/action", lambda one: f"{one.kernels:.1f}"),
)
MEMORY_COLUMNS: Columns = (
    ("width", lambda one: f"{one.width}"),
    ("tokens", lambda one: f"{one.tokens}"),
    ("in flight", lambda one: f"{one.num_in_flight}"),
    ("an output, MB", lambda one: f"{one.output_bytes / 2**20:.1f}"),
    ("kept, MB", lambda one: f"{one.kept / 2**20:.1f}"),
    ("freed, MB", lambda one: f"{one.freed / 2**20:.1f}"),
    ("saved", lambda one: f"{one.saved:.2f}"),
)
PAIR_COLUMNS: Columns = (
    ("width", lambda one: f"{one.width}"),
    ("tokens", lambda one: f"{one.tokens}"),
    ("collective, ms", lambda one: ms(one.collective, 3)),
    ("compute, ms", lambda one: ms(one.compute.median, 3)),
    ("link, ms", lambda one: ms(one.link, 3)),
    ("one by one", lambda one: f"{one.multiple(one.alone.median):.3f}"),
    ("F+B", lambda one: f"{one.multiple(one.paired.median):.3f}"),
    ("gain", lambda one: f"{one.alone.median / one.paired.median:.3f}"),
)
PRODUCT_COLUMNS: Columns = (
    ("spinning blocks", lambda one: f"{one.num_blocks}"),
    ("ms per product", lambda one: ms(one.time.median, 3)),
    ("TFLOP/s", lambda one: f"{one.teraflops:.1f}"),
    ("of alone", lambda one: f"{one.of_alone:.3f}"),
    ("they spun until the end", lambda one: "yes" if one.overlapped else "NO"),
)


def text(figures: Figures) -> str:
    """The page."""
    parts: list[str | Sequence[str]] = [TITLE, figures.machine]
    if figures.steps:
        parts += ["## Steps", READING, *_cases(figures.steps, STEP_COLUMNS), "## Bars", figures.verdicts]
    if figures.host:
        parts += ["## The host's work", HOST, *_cases(figures.host, HOST_COLUMNS)]
    if figures.memory:
        parts += ["## Memory of sent outputs", MEMORY, table(MEMORY_COLUMNS, figures.memory)]
    if figures.pairs:
        parts += ["## Two micro-batches at once", PAIRS, table(PAIR_COLUMNS, figures.pairs)]
    if figures.products:
        about = f"{PRODUCTS} Products of {' x '.join(map(str, figures.products[0].shape))}."
        parts += ["## Matrix products while others spin", about, table(PRODUCT_COLUMNS, figures.products)]
    if figures.failed:
        parts += ["## Failed", [f"{part}: {why}" for part, why in figures.failed.items()]]
    return page(*parts)


def _cases(cases: Sequence[CaseFigures], columns: Columns) -> Iterator[str | Sequence[str]]:
    for case in cases:
        shape = f"{case.samples} x {case.tokens // case.samples} tokens per micro-batch"
        yield f"### {NAMES[case.kind]}: {case.num_blocks} of width {case.width}, {shape}"
        yield table(columns, case.candidates)
        yield f"Losses differ by {largest_difference(case.candidates):.1e} at most, relative to the plain Trainer's."
        yield [f"{label} failed: {why}" for label, why in case.refused.items()]


def draw(figures: Figures, path: Path) -> None:
    """A row for each kind of model, with TFLOP/s by tokens; then the host's work, and the products."""
    kinds = list(dict.fromkeys(case.kind for case in figures.steps))
    num_rows = max(1, len(kinds) + bool(figures.host) + bool(figures.products))
    figure = new(9.5, 2.9 * num_rows)
    rows = iter(figure.subplots(num_rows, 1, squeeze=False)[:, 0])
    for kind in kinds:
        cases = [case for case in figures.steps if case.kind == kind]
        axes = next(rows)
        first = cases[0]
        plain(axes, f"{NAMES[kind]}: {first.num_blocks} of width {first.width}; numbers: of plain", y="TFLOP/s")
        names = [f"{case.tokens} tokens" for case in cases]
        _groups(axes, cases, names, lambda one: one.teraflops, lambda one: f"{one.of_plain.median:.2f}")
        if figures.peak is not None:
            axes.axhline(figures.peak, color=RED, linewidth=1, linestyle=":")
            axes.annotate("peak", (0, figures.peak), (0, -9), textcoords="offset points", fontsize=7, color=RED)
    if figures.host:
        axes = next(rows)
        plain(axes, "The host's work", y="microseconds per action")
        names = [NAMES[case.kind] for case in figures.host]
        _groups(axes, figures.host, names, lambda one: one.microseconds, lambda one: f"{one.microseconds:.0f}")
    if figures.products:
        axes = next(rows)
        plain(axes, "Matrix products while others spin", y="speed, of alone", x="spinning thread blocks")
        labels = [str(one.num_blocks) for one in figures.products]
        bars = axes.bar(labels, [one.of_alone for one in figures.products], width=0.4, color=GREEN)
        axes.bar_label(bars, fmt="%.2f", fontsize=7)
    save(figure, path)


def _groups(
    axes: "Axes",
    cases: Sequence[CaseFigures],
    names: Sequence[str],
    height: Callable[[StepFigures], float],
    text: Callable[[StepFigures], str],
) -> None:
    """A group of bars for each case, a bar for each candidate."""
    shown = [label for label in COLOURS if any(one.label == label for case in cases for one in case.candidates)]
    width = 0.8 / max(1, len(shown))
    for place, case in enumerate(cases):
        for position, one in enumerate(case.candidates):
            x = place + (position - (len(case.candidates) - 1) / 2) * width
            hatch = "//" if one.label.endswith(COMPILED) else None
            bars = axes.bar(x, height(one), width=0.9 * width, color=COLOURS[one.label], hatch=hatch, edgecolor="white")
            axes.bar_label(bars, [text(one)], fontsize=7)
    for label in shown:
        axes.bar(0, 0, color=COLOURS[label], label=label, hatch="//" if label.endswith(COMPILED) else None)
    axes.set_xticks(range(len(cases)), names)
    axes.margins(y=0.15)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


PRECISIONS = ("bf16-true", "bf16-mixed")
BLOCKS = {"eager": EAGER, "compiled": ALL[len(EAGER) :]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the tables and write the requested files. Returns the exit code."""
    parser = new_parser("gpu", __doc__, picture="draw speeds, the host's work and the products")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="(default: all)")
    number(parser, "--rounds", 5, "the median is shown")
    parser.add_argument("--precision", choices=PRECISIONS, default=PRECISIONS[0], help="(default bf16-true)")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, which also run on a CPU: for trying it out")
    parser.add_argument("--blocks", choices=BLOCKS, help="(default: both; compiled ones take minutes to compile)")
    parser.add_argument("--tokens", nargs="+", type=int, metavar="N", help="per micro-batch (default: 1024 4096 16384)")
    parser.add_argument("--again", type=Path, metavar="FILE.json", help="measure nothing: format the figures in it")
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    figures = stored(options.again, partial(read, Figures)) if options.again else _figures(options)
    return Findings(text(figures), figures.plain(), {"picture": lambda path: draw(figures, path)})


def _figures(options: argparse.Namespace) -> Figures:
    card = find_card(toy=options.toy)
    _say(card.about)
    scale = TOY if options.toy else FULL
    if options.tokens:
        scale = replace(scale, tokens=tuple(options.tokens))
    measuring = Run(card, scale, Rounds(options.rounds), BLOCKS.get(options.blocks, ALL), options.precision, _say)
    sizes = "toy sizes, which say nothing about the device" if options.toy else f"parts: {' '.join(options.parts)}"
    note = f"{options.precision}; {sizes}"

    def keep(figures: Figures) -> None:
        figures.machine = describe(card.about, note)
        if options.json:
            options.json.write_text(json.dumps(figures.plain()))

    return measuring.measure([part for part in PARTS if part in options.parts], keep)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

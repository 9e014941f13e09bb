"""Formats the figures of a GPU as Markdown and as a picture."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.benchmarks.gpu.figures import Figures
from recipes.benchmarks.gpu.fits import ALL, MICROBATCHES
from recipes.benchmarks.gpu.memory import MemoryFigures
from recipes.benchmarks.gpu.pairs import PairFigures
from recipes.benchmarks.gpu.products import ProductFigures
from recipes.benchmarks.gpu.steps import CaseFigures, StepFigures, largest_difference
from recipes.paper.figure import BLUE, GREEN, GREY, INK, ORANGE, RED, VIOLET, new, plain, save
from recipes.paper.table import markdown, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLE = "# One GPU"
NAMES = {"llama": "Llama blocks", "gpt": "GPT"}
COLOURS = dict(zip((one.label for one in ALL), (GREY, BLUE, ORANGE, INK, VIOLET, RED), strict=True))
STEP_HEAD = ("", "step ms", "min-max", "TFLOP/s", "of peak", "of plain", "min-max", "kernels/action", "us/action")
HOST_HEAD = ("", "us/action", "min-max", "CPU us/action", "of plain", "kernels/action")
MEMORY_HEAD = ("width", "tokens", "in flight", "an output, MB", "kept, MB", "freed, MB", "saved")
PRODUCT_HEAD = ("spinning blocks", "ms per product", "TFLOP/s", "of alone", "they spun until the end")
PAIR_HEAD = ("width", "tokens", "collective, ms", "compute, ms", "link, ms", "one by one", "F+B", "gain")
READING = f"""\
All candidates train the same model on the same {MICROBATCHES} micro-batches per step, each in its own fit,
and their steps run in turn. The plain Trainer accumulates the micro-batches' gradients. An action is the forward
or the backward of one block; with P=1 W=2 each block is a stage. Kernels and microseconds are those of a whole step,
divided by its actions. "of plain" is the speed compared with the plain Trainer's in the same round, compiled if the
candidate is. TFLOP/s count six operations per token and weight of a matrix, and 6 seq width per token and block for
causal attention; the peak is that of NVIDIA's data sheet, without sparsity."""
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


def table(figures: Figures) -> str:
    """The page."""
    parts = [TITLE, _listed(figures.machine)]
    if figures.steps:
        parts += ["## Steps", READING, *map(_case, figures.steps), "## Bars", _listed(figures.verdicts)]
    if figures.host:
        parts += ["## The host's work", HOST, *map(_host_case, figures.host)]
    if figures.memory:
        parts += ["## Memory of sent outputs", MEMORY, markdown(MEMORY_HEAD, map(_memory_row, figures.memory))]
    if figures.pairs:
        parts += ["## Two micro-batches at once", PAIRS, markdown(PAIR_HEAD, map(_pair_row, figures.pairs))]
    if figures.products:
        shape = " x ".join(map(str, figures.products[0].shape))
        rows = markdown(PRODUCT_HEAD, map(_product_row, figures.products))
        parts += ["## Matrix products while others spin", f"{PRODUCTS} Products of {shape}.", rows]
    if figures.failed:
        parts += ["## Failed", _listed([f"{part}: {why}" for part, why in figures.failed.items()])]
    return "\n\n".join(parts) + "\n"


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _memory_row(one: MemoryFigures) -> tuple[str, ...]:
    sizes = (f"{count / 2**20:.1f}" for count in (one.output_bytes, one.kept, one.freed))
    return f"{one.width}", f"{one.tokens}", f"{one.num_in_flight}", *sizes, f"{one.saved:.2f}"


def _pair_row(one: PairFigures) -> tuple[str, ...]:
    times = (f"{1e3 * seconds:.3f}" for seconds in (one.collective, one.compute.median, one.link))
    ways = (f"{one.multiple(seconds):.3f}" for seconds in (one.alone.median, one.paired.median))
    return f"{one.width}", f"{one.tokens}", *times, *ways, f"{one.alone.median / one.paired.median:.3f}"


def _product_row(one: ProductFigures) -> tuple[str, ...]:
    spun = "yes" if one.overlapped else "NO"
    return f"{one.num_blocks}", f"{1e3 * one.time.median:.3f}", f"{one.teraflops:.1f}", f"{one.of_alone:.3f}", spun


def _title(case: CaseFigures) -> str:
    shape = f"{case.samples} x {case.tokens // case.samples} tokens per micro-batch"
    return f"{NAMES[case.kind]}: {case.num_blocks} of width {case.width}, {shape}"


def _case(case: CaseFigures) -> str:
    return _section(case, markdown(STEP_HEAD, map(_step_row, case.candidates)))


def _host_case(case: CaseFigures) -> str:
    return _section(case, markdown(HOST_HEAD, map(_host_row, case.candidates)))


def _section(case: CaseFigures, rows: str) -> str:
    notes = [f"{label} failed: {why}" for label, why in case.refused.items()]
    losses = f"Losses differ by {largest_difference(case.candidates):.1e} at most, relative to the plain Trainer's."
    return "\n\n".join(filter(None, [f"### {_title(case)}", rows, losses, _listed(notes)]))


def _step_row(one: StepFigures) -> tuple[str, ...]:
    return (
        one.label,
        f"{1e3 * one.step.median:.2f}",
        f"{1e3 * one.step.least:.2f}-{1e3 * one.step.most:.2f}",
        f"{one.teraflops:.1f}",
        "-" if one.of_peak is None else percent(one.of_peak),
        f"{one.of_plain.median:.3f}",
        f"{one.of_plain.least:.3f}-{one.of_plain.most:.3f}",
        f"{one.kernels:.1f}",
        f"{one.microseconds:.0f}",
    )


def _host_row(one: StepFigures) -> tuple[str, ...]:
    per_action = one.microseconds / one.step.median
    return (
        one.label,
        f"{one.microseconds:.0f}",
        f"{one.step.least * per_action:.0f}-{one.step.most * per_action:.0f}",
        f"{one.cpu * per_action:.0f}",
        f"{one.of_plain.median:.3f}",
        f"{one.kernels:.1f}",
    )


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
            bars = axes.bar(x, height(one), width=0.9 * width, color=COLOURS[one.label])
            axes.bar_label(bars, [text(one)], fontsize=7)
    for label in shown:
        axes.bar(0, 0, color=COLOURS[label], label=label)
    axes.set_xticks(range(len(cases)), names)
    axes.margins(y=0.15)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))

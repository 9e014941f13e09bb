"""The parts of the benchmark, and their sizes: those of a GPU, and toy ones for any machine."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from recipes.benchmarks.gpu import memory, pairs, products, steps
from recipes.benchmarks.gpu.card import Card
from recipes.benchmarks.gpu.figures import Figures
from recipes.benchmarks.gpu.fits import ALL, EAGER, Case
from recipes.benchmarks.gpu.models import Kind, Precision, Sizes
from recipes.benchmarks.gpu.steps import Rounds, Say


@dataclass(frozen=True)
class Scale:
    """The sizes of a run."""

    models: Mapping[Kind, Sizes]
    narrow: Mapping[Kind, Sizes]
    """so narrow that the GPU waits for the host"""
    tokens: tuple[int, ...]
    """per micro-batch"""
    bar_tokens: int
    """the one of them at which bars are checked; compiled blocks run there alone"""
    longest: int
    """sequence; more tokens are several sequences"""
    product: tuple[int, int, int]

    def cases(self, kind: Kind, *, is_eager: bool) -> list[Case]:
        """The cases of a model."""
        found = []
        for tokens in self.tokens:
            sequence = min(tokens, self.longest)
            candidates = ALL if tokens == self.bar_tokens and not is_eager else EAGER
            found.append(Case(kind, self.models[kind], tokens // sequence, sequence, candidates))
        return found

    def host_cases(self, *, is_eager: bool) -> list[Case]:
        """The cases of narrow models."""
        return [Case(kind, sizes, 1, 16, EAGER if is_eager else ALL) for kind, sizes in self.narrow.items()]


LLAMA_7B = Sizes(width=4096, num_heads=32, feed_forward=11008, num_blocks=4)
GPT_BLOCKS = Sizes(width=2048, num_heads=16, feed_forward=8192, num_blocks=4, vocabulary=32000)
_NARROW: Mapping[Kind, Sizes] = {"llama": Sizes(64, 4, 128, 4), "gpt": Sizes(64, 4, 256, 4, 64)}
FULL = Scale({"llama": LLAMA_7B, "gpt": GPT_BLOCKS}, _NARROW, (1024, 4096, 16384), 4096, 4096, (4096, 4096, 11008))
TOY = Scale({"llama": Sizes(16, 2, 32, 4), "gpt": Sizes(16, 2, 64, 4, 32)}, _NARROW, (16,), 16, 8, (8, 8, 8))


@dataclass(frozen=True)
class Run:
    """One run of the benchmark: where, at which sizes, and how often."""

    card: Card
    scale: Scale
    rounds: Rounds
    is_eager: bool
    """leave out compiled blocks"""
    precision: Precision
    say: Say

    def measure(self, parts: Sequence[str], keep: Callable[[Figures], None]) -> Figures:
        """Run the parts, one after the other; one that fails is noted, and the others go on.

        `keep` is called after each part, so that a run that is killed leaves what it has measured.
        """
        figures, begin = Figures([], self.card.peak, self.scale.bar_tokens), time.monotonic()
        for part in parts:
            try:
                PARTS[part](self, figures)
            except Exception as error:
                figures.failed[part] = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                self.say(f"{part} failed: {figures.failed[part]}")
            keep(figures)
            self.say(f"{time.monotonic() - begin:.0f} s: {part} has ended")
        return figures


def _products(run: Run, figures: Figures) -> None:
    figures.products += products.measure(run.scale.product, run.card, run.say)


def _memory(run: Run, figures: Figures) -> None:
    figures.memory.append(memory.measure(run.scale.models["llama"], run.scale.bar_tokens, run.card, run.say))


def _pairs(run: Run, figures: Figures) -> None:
    sizes, rounds = run.scale.models["llama"], run.rounds.rounds
    figures.pairs.append(pairs.measure(sizes, run.scale.bar_tokens, run.card, rounds, run.say))


def _steps(kind: Kind) -> Callable[[Run, Figures], None]:
    def measure(run: Run, figures: Figures) -> None:
        for case in run.scale.cases(kind, is_eager=run.is_eager):
            figures.steps.append(steps.measure(replace(case, precision=run.precision), run.card, run.rounds, run.say))

    return measure


def _host(run: Run, figures: Figures) -> None:
    often = replace(run.rounds, rounds=3 * run.rounds.rounds)  # steps of milliseconds
    for case in run.scale.host_cases(is_eager=run.is_eager):
        figures.host.append(steps.measure(replace(case, precision=run.precision), run.card, often, run.say))


PARTS: dict[str, Callable[[Run, Figures], None]] = {
    "products": _products,
    "memory": _memory,
    "pairs": _pairs,
    "llama": _steps("llama"),
    "gpt": _steps("gpt"),
    "host": _host,
}
"""in the order in which they run: the quick ones first"""

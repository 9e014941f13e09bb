"""Measures steps of all candidates of a case in turn: time, operations per second, kernels, and the plain one's ratio.

round 0     plain  plain  plain | strategy  strategy  strategy | 3-D  3-D  3-D       the device is idle at each |
round 1     strategy ...        | 3-D ...                      | plain ...
"""

import gc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from recipes.benchmarks.fits import SteppedFit, timed
from recipes.benchmarks.gpu.card import Card
from recipes.benchmarks.gpu.models import COMPILED, MICROBATCHES, PLAIN, Case, Kind, operations, start_fit
from recipes.benchmarks.harness import Summary, in_turn

WARM_UP, WARM_UP_OF_SHORT = 3, 18
"""steps before the timed ones. The strategy looks at the first 16 batches, which takes some of the host's time"""
SHORT = 4096
"""tokens per micro-batch, up to which that counts"""
Say = Callable[[str], None]
"""Prints a figure as soon as it is there."""


@dataclass(frozen=True)
class Rounds:
    """How often steps are timed."""

    rounds: int = 5
    steps: int = 3
    """of one candidate in a row, timed together"""

    @property
    def num_steps(self) -> int:
        """The steps of a fit after its warm-up: timed ones, and one whose kernels are counted."""
        return self.rounds * self.steps + 1


@dataclass(frozen=True)
class StepFigures:
    """A candidate in a case. Times are in seconds per step, summarised over the rounds."""

    label: str
    step: Summary
    cpu: float
    """of all the process's threads"""
    of_plain: Summary
    """speed compared with the plain Trainer's, compiled if this candidate is: its step of the same round / this one"""
    teraflops: float
    of_peak: float | None
    kernels: float
    """per action"""
    microseconds: float
    """per action"""
    loss: float


@dataclass(frozen=True)
class CaseFigures:
    """All candidates of a case."""

    kind: Kind
    width: int
    num_blocks: int
    tokens: int
    samples: int
    candidates: tuple[StepFigures, ...]
    refused: Mapping[str, str]
    """candidates that failed, and with what error"""

    def speed(self, label: str) -> float | None:
        """A candidate's speed, compared with the plain one's; None if it failed."""
        return next((one.of_plain.median for one in self.candidates if one.label == label), None)


@dataclass
class _Running:
    """A fit, and its times so far."""

    fit: SteppedFit
    times: list[float]
    cpu: list[float]
    kernels: int = 0


def measure(case: Case, card: Card, rounds: Rounds, say: Say) -> CaseFigures:
    """Run all candidates of a case. One that fails is left out, and the others go on."""
    torch.compiler.reset()  # what was compiled for another case would count as a recompilation
    refused: dict[str, str] = {}
    running: dict[str, _Running] = {}
    warm_up = WARM_UP_OF_SHORT if case.tokens <= SHORT else WARM_UP
    try:
        for candidate in case.candidates:
            with _Refusing(refused, candidate.label):
                fit = start_fit(case, candidate, card, warm_up + rounds.num_steps)
                running[candidate.label] = _Running(fit, [], [])
                fit.run(warm_up)
        for _, label in in_turn(list(running), rounds.rounds):
            if label not in refused:
                with _Refusing(refused, label):
                    seconds, cpu = timed(running[label].fit, rounds.steps, card.synchronize)
                    running[label].times.append(seconds)
                    running[label].cpu.append(cpu)
        for label in [label for label in running if label not in refused]:
            with _Refusing(refused, label):
                running[label].kernels = card.kernels_of(lambda fit=running[label].fit: fit.run(1))  # type: ignore[misc]
    finally:
        for one in running.values():
            one.fit.close()
        gc.collect()  # a Trainer and its module hold each other, and with them the device's memory
    found = {label: one for label, one in running.items() if label not in refused}
    figures = CaseFigures(case.kind, case.sizes.width, case.sizes.num_blocks, case.tokens, case.samples,
                          tuple(_figures(case, card, label, found) for label in found), refused)  # fmt: skip
    say_case(figures, say)
    return figures


def say_case(figures: CaseFigures, say: Say) -> None:
    """Print a line per candidate."""
    for one in figures.candidates:
        say(
            f"{figures.kind}, width {figures.width}, {figures.tokens} tokens, {one.label}: {1e3 * one.step.median:.2f} "
            f"ms, {one.teraflops:.1f} TFLOP/s, {one.of_plain.median:.3f} of plain, {one.kernels:.1f} kernels and "
            f"{one.microseconds:.0f} us per action"
        )
    for label, why in figures.refused.items():
        say(f"{figures.kind}, {figures.tokens} tokens, {label}: failed: {why}")


class _Refusing:
    """Notes a candidate's error instead of raising it."""

    def __init__(self, refused: dict[str, str], label: str) -> None:
        self._refused, self._label = refused, label

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        if not isinstance(error, Exception):
            return False
        self._refused[self._label] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return True


def _figures(case: Case, card: Card, label: str, running: Mapping[str, _Running]) -> StepFigures:
    one = running[label]
    peer = running.get(PLAIN + (COMPILED if label.endswith(COMPILED) else ""), one)
    step = Summary.of(one.times)
    teraflops = operations(case.kind, case.sizes, (MICROBATCHES * case.samples, case.sequence)) / step.median / 1e12
    return StepFigures(
        label,
        step,
        median(one.cpu),
        Summary.of([plain / own for plain, own in zip(peer.times, one.times, strict=True)]),
        teraflops,
        None if card.peak is None else teraflops / card.peak,
        one.kernels / case.num_actions,
        1e6 * step.median / case.num_actions,
        one.fit.loss,
    )


def largest_difference(candidates: Sequence[StepFigures]) -> float:
    """The largest relative difference of a loss from the first candidate's; NaN if a loss is."""
    differences = [abs(one.loss / candidates[0].loss - 1) for one in candidates]
    return math.nan if any(map(math.isnan, differences)) else max(differences, default=0.0)

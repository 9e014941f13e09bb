"""All figures of a run, to and from JSON, and the bars that they should reach."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from recipes.benchmarks.gpu.fits import ALL
from recipes.benchmarks.gpu.memory import MemoryFigures
from recipes.benchmarks.gpu.models import Kind
from recipes.benchmarks.gpu.pairs import PairFigures
from recipes.benchmarks.gpu.products import ProductFigures
from recipes.benchmarks.gpu.steps import CaseFigures

_WAVES, _LAYERS, _COMPILED_WAVES, _COMPILED_LAYERS = (one.label for one in ALL if one.waves or one.has_3d_layers)


@dataclass(frozen=True)
class Bar:
    """The least speed of a candidate, compared with the plain Trainer's."""

    kind: Kind
    label: str
    least: float

    def verdict(self, cases: Sequence[CaseFigures], tokens: int) -> str:
        """Whether it was reached at `tokens` tokens, in a line."""
        speeds = [case.speed(self.label) for case in cases if (case.kind, case.tokens) == (self.kind, tokens)]
        head = f"{self.kind}, {tokens} tokens, {self.label}: at least {self.least} of plain"
        if not speeds or speeds[0] is None:
            return f"{head}: not measured"
        return f"{head}: {'reached' if speeds[0] >= self.least else 'MISSED'}, {speeds[0]:.3f}"


BARS = tuple(
    Bar(kind, label, least)
    for kind in ("llama", "gpt")
    for label, least in ((_WAVES, 0.97), (_COMPILED_WAVES, 0.97), (_LAYERS, 0.95), (_COMPILED_LAYERS, 0.98))
)


@dataclass
class Figures:
    """What was measured; a part that didn't run, or failed, left nothing."""

    machine: list[str]
    peak: float | None
    """of the device, in TFLOP/s"""
    bar_tokens: int
    steps: list[CaseFigures] = field(default_factory=list)
    host: list[CaseFigures] = field(default_factory=list)
    """the same with models so narrow that the host decides how long a step takes"""
    memory: list[MemoryFigures] = field(default_factory=list)
    products: list[ProductFigures] = field(default_factory=list)
    pairs: list[PairFigures] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """parts that failed, and with what error"""

    @property
    def verdicts(self) -> list[str]:
        """A line for each bar."""
        return [bar.verdict(self.steps, self.bar_tokens) for bar in BARS]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        parts = {name: [one.plain() for one in getattr(self, name)] for name in _PARTS}
        return {"machine": self.machine, "peak": self.peak, "bar_tokens": self.bar_tokens} | parts | {
            "failed": self.failed, "bars": self.verdicts,
        }  # fmt: skip

    @staticmethod
    def of(plain: Mapping[str, Any]) -> "Figures":
        """From JSON."""
        parts = {name: [figures.of(one) for one in plain.get(name, [])] for name, figures in _PARTS.items()}
        return Figures(plain["machine"], plain["peak"], plain["bar_tokens"], **parts, failed=plain["failed"])


_PARTS: dict[str, Any] = {
    "steps": CaseFigures,
    "host": CaseFigures,
    "memory": MemoryFigures,
    "products": ProductFigures,
    "pairs": PairFigures,
}

"""The verdict of a check: what came of it, in words and figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal

from lightning_hanayo.checking.case import RankFailure, RankResult
from lightning_hanayo.checking.causes import Place, likely_cause
from lightning_hanayo.checking.comparison import Comparison, Difference

Outcome = Literal["exact", "depends on micro-batches", "differs", "refused", "failed"]


@dataclass(frozen=True)
class Verdict:
    """What a check has found.

    Example:
        >>> Verdict("exact", "the layout is exact").exit_code
        0
    """

    outcome: Outcome
    summary: str
    """one line"""
    cause: str = ""
    """the likely cause and the way out"""
    layout: Comparison | None = None
    """the layout, compared with one process that runs the same micro-batches"""
    microbatches: Comparison | None = None
    """one process that runs micro-batches, compared with one that runs whole batches"""
    options: Mapping[str, Comparison | str] = field(default_factory=dict)
    """by loss_weight: micro-batches, compared with whole batches; or why it can't be used"""
    notes: tuple[str, ...] = ()
    """what was done to the module, and what wasn't compared"""
    trace: str = ""
    """the traceback, where a run failed"""

    @property
    def exit_code(self) -> int:
        """0: exact; 1: anything else."""
        return int(self.outcome != "exact")


def verdict_of_failure(failures: list[RankFailure], notes: tuple[str, ...] = ()) -> Verdict:
    """The layout didn't train: the strategy refused it, or a rank failed. The first failure counts."""
    cause = min(failures, key=lambda one: (one.is_consequence, not one.is_refusal, one.kind in ("died", "timed out")))
    if cause.is_refusal:
        return Verdict("refused", f"refused: {cause.message}", notes=notes)
    summary = f"the layout fails where one process does not: rank {cause.rank}: {cause.kind}: {cause.message}"
    return Verdict("failed", summary, notes=notes, trace=cause.trace)


def verdict_of_layout(compared: Comparison, place: Place, one_process: RankResult, notes: tuple[str, ...]) -> Verdict:
    """The layout, compared with one process that runs the same micro-batches."""
    if compared.is_exact:
        return Verdict(
            "exact", f"the layout is exact (largest difference {compared.gap:.0e})", layout=compared, notes=notes
        )
    first = compared.differences[0]
    summary = f"the layout differs, first in {describe(first)}"
    belongs = place.describe(first.key)
    cause = f"It is {belongs}. {likely_cause(compared, place, one_process)}"
    return Verdict("differs", summary, cause, layout=compared, notes=notes)


def describe(one: Difference) -> str:
    """A difference in words, such as "the loss of batch 0 in step 0: 2.31, expected 2.30"."""
    of = {"loss": "the loss of", "log": "the logged"}.get(one.key.kind, f"the {one.key.kind} of")
    values = one.note or f"{_number(one.actual)}, expected {_number(one.expected)}"
    off = f" (off by {one.gap:.1e} of its size)" if isfinite(one.gap) else ""
    return f"{of} {one.key.name} in step {one.key.step}: {values}{off}"


def verdict_of_microbatches(
    exact: Verdict, compared: Comparison, options: Mapping[str, Comparison | str], suspects: tuple[str, ...]
) -> Verdict:
    """The layout is exact, but micro-batches aren't what whole batches are.

    Args:
        exact: the verdict on the layout.
        compared: micro-batches with whole batches.
        options: each other loss_weight, compared in the same way; or why it can't be used.
        suspects: modules whose outputs depend on the other samples of a batch.
    """
    first = compared.differences[0]
    solved = [name for name, one in options.items() if isinstance(one, Comparison) and one.trains_alike]
    ending, advice = "", _advice(first, suspects)
    if solved:
        ending, advice = f": loss_weight={solved[0]!r} makes it exact", _set_option(solved[0], options)
    elif options:
        ending = ", and no loss_weight by name makes it exact"
    return replace(
        exact,
        outcome="depends on micro-batches",
        summary=f"micro-batches change {changed_value(compared)}{ending}",
        cause=f"The layout itself is right: it equals one process that runs the same micro-batches. {advice}",
        microbatches=compared,
        options=options,
    )


def changed_value(compared: Comparison) -> str:
    """What changes first and by how much, such as "your loss by 12 %"."""
    kind, name = compared.differences[0].key.kind, compared.differences[0].key.name
    what = {"loss": "your loss", "log": f"the logged {name}"}.get(kind, f"your {kind}s")
    gap = max(one.gap for one in compared.differences if one.key.kind == kind)
    return f"{what} by {gap * 100:.3g} %" if isfinite(gap) else what


def _set_option(name: str, options: Mapping[str, Comparison | str]) -> str:
    compared = options[name]
    logged = (
        ""
        if isinstance(compared, str) or compared.is_exact
        else (f" Of what you log, {compared.differences[0].key.name} then still depends on micro-batches.")
    )
    return f"Set HanayoStrategy(loss_weight={name!r}).{logged}"


def _advice(first: Difference, suspects: tuple[str, ...]) -> str:
    if first.key.kind == "log":
        return (
            "The training is that of whole batches. A mean over micro-batches isn't the value over all their samples."
        )
    if suspects:
        return f"BatchNorm takes its statistics over each micro-batch: {', '.join(suspects[:4])}."
    return (
        "The samples of a batch depend on each other: in-batch negatives, a norm or a rank over the batch, or a tensor "
        "that isn't cut as you mean it. For a mean over something else, give loss_weight a function that counts it."
    )


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.10g}"

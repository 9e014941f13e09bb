"""The verdict of a check: what came of it, in words and figures.

Names the likely cause of a difference between a layout and one process, and where the value belongs.

Shows a verdict: one screen for a terminal, or everything as JSON.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose, isfinite
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_hanayo.checking.case import RankFailure, RankResult, Stage
from lightning_hanayo.checking.comparison import KINDS, Comparison, Difference, Key, Kind
from lightning_hanayo.errors import listed


@dataclass(frozen=True)
class Place:
    """Where values belong on a layout."""

    stack: str
    stages: tuple[Stage, ...]
    has_cube: bool
    shares_samples: bool = False
    """whether each rank of a cube runs the step on its share of a micro-batch: `cube_outside="share"`"""

    def block_of(self, name: str) -> int | None:
        """The number of the block that a parameter or buffer belongs to; None outside the stack."""
        found = re.match(rf"{re.escape(self.stack)}\.(\d+)\." if self.stack else r"(\d+)\.", name)
        return int(found[1]) if found else None

    def stage_of(self, block: int) -> int:
        """The stage that has the block."""
        return next(i for i, stage in enumerate(self.stages) if block in stage.blocks)

    def rank_of(self, name: str) -> int:
        """The pipeline rank that has the value: 0 for what is outside the stack."""
        block = self.block_of(name)
        return 0 if block is None else self.stages[self.stage_of(block)].pipe_rank

    def describe(self, key: Key) -> str:
        """In words, such as "block 5 of model.layers, on pipeline rank 1, stage 2"."""
        if key.kind in ("loss", "log"):
            return "computed by the step on pipeline rank 0"
        block = self.block_of(key.name)
        sharded = ", sharded over the cube" if self.has_cube and key.kind != "buffer" else ""
        if block is None:
            return f"outside the stack {self.stack}, on pipeline rank 0{sharded}"
        stage = self.stage_of(block)
        return f"block {block} of {self.stack}, on pipeline rank {self.stages[stage].pipe_rank}, stage {stage}{sharded}"


def likely_cause(compared: Comparison, place: Place, one_process: RankResult) -> str:
    """What explains the differences best: one or two sentences.

    Args:
        compared: the layout with one process; not exact.
        place: where values belong.
        one_process: what the step did in one process.
    """
    first = compared.differences[0]
    if first.data_rank:
        return f"Data rank {first.data_rank} has another value than one process: the data ranks don't agree on it."
    if first.key.kind == "log":
        return (
            "Only logged values differ, and no loss, gradient or weight: they are reduced over micro-batches otherwise."
        )
    reason = _BY_KIND[first.key.kind](compared, place, one_process)
    if first.key.step == 0:
        return reason
    return (
        f"Optimizer step {first.key.step} is the first that differs, so it depends on what the earlier ones have left "
        f"besides weights and buffers: attributes that the step or the blocks set, or the optimizer's state. {reason}"
    )


def stored_by_blocks(changed_attributes: Sequence[str], stack: str) -> str:
    """The cause, if blocks set attributes; else nothing."""
    of_blocks = [name for name in changed_attributes if name.startswith(f"{stack}.")]
    patterns = sorted({re.sub(rf"^({re.escape(stack)}\.)\d+", r"\1*", name) for name in of_blocks})
    if not patterns:
        return ""
    return (
        f"Blocks set {listed(patterns, 4)} in their forward. What a block stores on another rank isn't seen by the "
        f"step on pipeline rank 0: let the block return it."
    )


def _of_loss(compared: Comparison, place: Place, one_process: RankResult) -> str:
    stored = stored_by_blocks(one_process.changed_attributes, place.stack)
    if stored:
        return stored
    if one_process.draws_numbers and place.has_cube:
        return "The step draws random numbers, and the ranks of a cube draw numbers of their own."
    outside = [name for name in one_process.changed_attributes if place.block_of(name) is None]
    if outside:
        return (
            f"The step changes {listed(outside, 4)}. Where micro-batches overlap, their steps interleave: one reads it "
            f"before the one in front has set it."
        )
    if place.shares_samples:
        return (
            "With cube_outside='share' the step of each rank of the cube sees its share of a micro-batch's samples. If "
            "they depend on each other (in-batch negatives, a norm over them), use cube_outside='replicate'."
        )
    return (
        "The forward itself is different: the step reads something that isn't the stack's output (parameters of "
        "blocks, a random generator of its own), or the micro-batches were cut otherwise."
    )


def _of_gradient(compared: Comparison, place: Place, one_process: RankResult) -> str:
    step = compared.differences[0].key.step
    wrong = [one for one in compared.differences if one.key.kind == "gradient" and one.key.step == step]
    names = {one.key.name for one in wrong}
    order = [name for name in one_process.forward_order if _is_gradient(one_process, step, name)]
    right = [name for name in order if name not in names]
    factors = [one.factor for one in wrong if one.factor is not None]
    scaled = bool(factors) and len(factors) == len(wrong) and all(isclose(f, factors[0], rel_tol=1e-4) for f in factors)
    times = f" All of them are {factors[0]:.6g} times what they should be." if scaled else ""
    return f"The loss is right. {_which(wrong, right, order, place)}{times}"


def _which(wrong: Sequence[Difference], right: Sequence[str], order: Sequence[str], place: Place) -> str:
    names = [one.key.name for one in wrong]
    if not right:
        return "All gradients differ: the loss is weighed otherwise, or the ranks sum them otherwise."
    if len(names) == 1:
        return f"Only the gradient of {names[0]} differs."
    if all(place.block_of(name) is None for name in names):
        return "Only parameters outside the stack differ."
    ranks = {place.rank_of(name) for name in names}
    if len(ranks) == 1 and all(place.block_of(name) is not None for name in names):
        of_blocks = f"of blocks on pipeline rank {ranks.pop()}"
        if len({place.stage_of(place.block_of(name) or 0) for name in names}) == 1:
            of_blocks += f", stage {place.stage_of(place.block_of(names[0]) or 0)},"
        return f"Only parameters {of_blocks} differ."
    last = max(order.index(name) for name in names if name in order)
    if all(order.index(name) > last for name in right):
        return f"Gradients are right from {right[0]} on, and wrong before it: one was lost or changed on its way back."
    return f"{len(names)} of {len(order)} gradients differ."


def _of_weight(compared: Comparison, place: Place, one_process: RankResult) -> str:
    return (
        "Losses and gradients are right until here. The optimizer, the clipping, or a hook between backward and step "
        "works across parameters (a norm over all of them, say), of which each rank has only its own."
    )


def _of_buffer(compared: Comparison, place: Place, one_process: RankResult) -> str:
    return "Only buffers differ: one is changed where the micro-batches come in another order, or on another rank."


_BY_KIND: dict[str, Callable[[Comparison, Place, RankResult], str]] = {
    "loss": _of_loss, "gradient": _of_gradient, "weight": _of_weight, "buffer": _of_buffer,
}  # fmt: skip


def _is_gradient(result: RankResult, step: int, name: str) -> bool:
    return Key(step, "gradient", name) in result.values


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


_PLURALS: Mapping[Kind, str] = {
    "loss": "losses",
    "gradient": "gradients",
    "weight": "weights",
    "buffer": "buffers",
    "log": "logged values",
}
_COLOURS = {"exact": "green", "depends on micro-batches": "yellow"}
_NUM_SHOWN = 4
"""differences that a screen lists"""


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print the summary, the largest differences, the first names that differ, and the likely cause."""
    console.print(Text(verdict.summary, style=f"bold {_COLOURS.get(verdict.outcome, 'red')}"))
    if verdict.layout is not None:
        console.print(_table(verdict.layout, verdict.microbatches))
    differences = _differences(verdict)
    for one in differences[:_NUM_SHOWN]:
        console.print(Text(f"  {describe(one)}"))
    if (more := len(differences) - _NUM_SHOWN) > 0:
        console.print(Text(f"  and {more} more (--json lists them)"))
    for name, option in verdict.options.items():
        console.print(Text(f"  loss_weight={name!r}: {_of_option(option)}"))
    for text in (verdict.cause, *(f"Note: {note.rstrip('.')}." for note in verdict.notes), verdict.trace):
        if text:
            console.print(Text(text))


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Everything that the check has found. A gap that can't be measured is null."""
    return {
        "outcome": verdict.outcome,
        "exit_code": verdict.exit_code,
        "summary": verdict.summary,
        "cause": verdict.cause,
        "layout": _comparison_json(verdict.layout),
        "microbatches": _comparison_json(verdict.microbatches),
        "options": {
            name: option if isinstance(option, str) else _comparison_json(option)
            for name, option in verdict.options.items()
        },
        "notes": list(verdict.notes),
        "trace": verdict.trace,
    }


def _table(layout: Comparison, microbatches: Comparison | None) -> Table:
    """The largest relative difference of each kind."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    columns = {"layout and micro-batches": layout}
    if microbatches is not None:
        columns["micro-batches and whole batches"] = microbatches
    table.add_column("largest difference")
    table.add_column("values", justify="right")
    for name in columns:
        table.add_column(name, justify="right")
    for kind in KINDS:
        if kind in layout.largest:
            gaps = [_gap(column.largest.get(kind, 0.0)) for column in columns.values()]
            table.add_row(_PLURALS[kind], str(layout.num_values[kind]), *gaps)
    return table


def _differences(verdict: Verdict) -> tuple[Difference, ...]:
    """The differences that the verdict is about; without the first of a layout, which the summary names."""
    if verdict.layout is not None and not verdict.layout.is_exact:
        return verdict.layout.differences[1:]
    return verdict.microbatches.differences if verdict.microbatches is not None else ()


def _of_option(option: Comparison | str) -> str:
    if isinstance(option, str):
        return option
    if option.is_exact:
        return "exact"
    return f"changes {changed_value(option)}{' (the training is exact)' if option.trains_alike else ''}"


def _comparison_json(compared: Comparison | None) -> dict[str, Any] | None:
    if compared is None:
        return None
    return {
        "exact": compared.is_exact,
        "largest": {kind: _finite(gap) for kind, gap in compared.largest.items()},
        "num_values": dict(compared.num_values),
        "differences": [
            one.key._asdict() | {name: _finite(value) for name, value in vars(one).items() if name != "key"}
            for one in compared.differences
        ],
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not isfinite(value) else value


def _gap(value: float) -> str:
    return f"{value:.0e}" if value else "0"

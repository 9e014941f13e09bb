"""Trains a case three ways, and compares them: whole batches, micro-batches on uncut models, and the layout.

whole batches  <->  micro-batches    does the loss survive being cut?      one process, a plain Trainer
micro-batches  <->  the layout       are pipeline and cube right?          a process for each data rank, the strategy

Dropout draws its masks per micro-batch, so it is switched off where whole batches are compared. The layout keeps it,
and uncut models draw the same masks; but not in a cube, whose ranks draw their own.

The verdict of a check: what came of it, the first value that differs, and where it is computed.

Shows a verdict: one screen for a terminal, or everything as JSON.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import isfinite, prod
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_hanayo.checking.case import Case, RankFailure, RankResult, Results, Run
from lightning_hanayo.checking.comparison import EXACT, KINDS, ROUNDED, Comparison, Difference, Key, Values, compare
from lightning_hanayo.checking.trainings import merge, run_rank, run_reference
from lightning_hanayo.errors import HanayoError, counted
from lightning_hanayo.pipeline_parallel.capture.whole_step import NO_ENTRIES
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.setup.checks import OF_MICROBATCHES
from lightning_hanayo.topology import Topology

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
    detail: str = ""
    """where the first value that differs is computed, or what the difference means"""
    layout: Comparison | None = None
    """the layout, compared with uncut models on the same micro-batches"""
    microbatches: Comparison | None = None
    """uncut models on micro-batches, compared with one process that runs whole batches"""
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


def verdict_of_layout(compared: Comparison, rank: RankResult, *, has_cube: bool, notes: tuple[str, ...]) -> Verdict:
    """The layout, of which `rank` is one, compared with uncut models on the same micro-batches."""
    if compared.is_exact:
        summary = f"the layout is exact (largest difference {compared.gap:.0e})"
        return Verdict("exact", summary, layout=compared, notes=notes)
    first = compared.differences[0]
    of_rank = f" Data rank {first.data_rank} has another value than one process." if first.data_rank else ""
    detail = f"It is {place_of(first.key, rank, has_cube=has_cube)}.{of_rank}"
    return Verdict("differs", f"the layout differs, first in {describe(first)}", detail, layout=compared, notes=notes)


def place_of(key: Key, rank: RankResult, *, has_cube: bool) -> str:
    """Where a value belongs on a layout, such as "block 5 of model.layers, on pipeline rank 1, stage 2"."""
    if key.kind in ("loss", "log"):
        return "computed by the step on pipeline rank 0"
    sharded = ", sharded over the cube" if has_cube and key.kind != "buffer" else ""
    block = next((i for i, name in enumerate(rank.block_names) if key.name.startswith(f"{name}.")), None)
    if block is None:
        return f"outside the stack {rank.stack}, on pipeline rank 0{sharded}"
    stage, pipe_rank = next((i, owner) for i, (blocks, owner) in enumerate(rank.stages) if block in blocks)
    return f"block {block} of {rank.stack}, on pipeline rank {pipe_rank}, stage {stage}{sharded}"


def describe(one: Difference) -> str:
    """A difference in words, such as "the loss of batch 0 in step 0: 2.31, expected 2.30"."""
    of = {"loss": "the loss of", "log": "the logged"}.get(one.key.kind, f"the {one.key.kind} of")
    values = one.note or f"{_number(one.actual)}, expected {_number(one.expected)}"
    off = f" (off by {one.gap:.1e} of its size)" if isfinite(one.gap) else ""
    return f"{of} {one.key.name} in step {one.key.step}: {values}{off}"


def summary_of_microbatches(compared: Comparison) -> str:
    """What micro-batches change first and by how much, such as "your loss by 12 %"."""
    kind, name = compared.differences[0].key.kind, compared.differences[0].key.name
    what = {"loss": "your loss", "log": f"the logged {name}"}.get(kind, f"your {kind}s")
    gap = max(one.gap for one in compared.differences if one.key.kind == kind)
    return f"micro-batches change {what}{f' by {gap * 100:.3g} %' if isfinite(gap) else ''}"


MICROBATCHES_DIFFER = (
    "Pipeline and cube are right: without them, the same micro-batches give the same. loss_weight says over what your "
    "loss is a mean. If the samples of a batch depend on each other (BatchNorm, in-batch negatives), no "
    "loss_weight makes it exact."
)

STORED_MEANS = (
    "Pipeline and cube are right: with step='microbatch' the layout gives the same as the same micro-batches without "
    "them. With any framework such a value, as the auxiliary loss of a router or the statistics of BatchNorm, depends "
    "on micro-batches and devices: it isn't a mean over samples."
)


CUBE_DRAWS = (
    "draws random numbers besides dropout. The ranks of a cube draw others for their samples than one process does, so "
    "that nothing can be compared. Check a module that doesn't draw them (give it an option for that), or leave the "
    "cube out."
)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.10g}"


_PLURALS = {"loss": "losses", "log": "logged values"}
"""of kinds that don't take an s"""
_COLOURS = {"exact": "green", "depends on micro-batches": "yellow"}
_NUM_SHOWN = 4
"""differences that a screen lists"""


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print the summary, the largest differences, and the first values that differ."""
    console.print(Text(verdict.summary, style=f"bold {_COLOURS.get(verdict.outcome, 'red')}"))
    if verdict.layout is not None:
        console.print(_table(verdict.layout, verdict.microbatches))
    differences = verdict.microbatches.differences if verdict.microbatches is not None else ()
    if verdict.layout is not None and not verdict.layout.is_exact:
        differences = verdict.layout.differences[1:]  # the summary names the first
    lines = list(dict.fromkeys(map(describe, differences)))  # data ranks have the same gradients and weights
    for line in lines[:_NUM_SHOWN]:
        console.print(Text(f"  {line}"))
    if (more := len(lines) - _NUM_SHOWN) > 0:
        console.print(Text(f"  and {more} more (--json lists them)"))
    for text in (verdict.detail, *(f"Note: {note.rstrip('.')}." for note in verdict.notes), verdict.trace):
        if text:
            console.print(Text(text))


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Everything that the check has found. A gap that can't be measured is null."""
    compared = {name: _comparison_json(getattr(verdict, name)) for name in ("layout", "microbatches")}
    return {**vars(verdict), **compared, "exit_code": verdict.exit_code, "notes": list(verdict.notes)}


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
            gaps = [column.largest.get(kind, 0.0) for column in columns.values()]
            cells = [f"{gap:.0e}" if gap else "0" for gap in gaps]
            table.add_row(_PLURALS.get(kind, f"{kind}s"), str(layout.num_values[kind]), *cells)
    return table


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


Tell = Callable[[str], None]
"""Is told which run begins."""


def examine(case: Case, run: Run, tell: Tell = lambda _: None, notes: tuple[str, ...] = ()) -> Verdict:
    """Check a case. `run` runs functions on ranks: `processes.run`, or a test's.

    Raises:
        HanayoError: the module doesn't train in one process.
    """

    def train(what: str, world_size: int, function: Callable[..., Any], case: Case) -> list[RankResult]:
        where = f"one process{' for each data rank' if world_size > 1 else ''}"
        tell(f"{where}: {what}{'' if case.has_dropout else ', without dropout'}")
        ranks = run(world_size, function, case)
        for one in ranks:
            if isinstance(one, RankFailure):
                raise HanayoError(f"the module fails in {where}, on {what}: {one.kind}: {one.message}")
        return [one for one in ranks if isinstance(one, RankResult)]

    def whole_batches(case: Case) -> RankResult:
        (result,) = train("whole batches", 1, run_reference, case)
        return result

    def micro_batches(case: Case) -> Values:
        uncut = _uncut(case, num)
        values, *_ = merge(
            train(counted(num, "micro-batch"), uncut.topology.world_size, run_rank, uncut), uncut.topology
        )
        return values

    whole = whole_batches(case)
    quiet, noise = case, ""
    if whole.draws_at:
        quiet = replace(case, has_dropout=False)
        whole = whole_batches(quiet)
        noise = whole.draws_at
        if noise:  # each micro-batch has numbers of its own, so that its loss can't be the whole batch's
            case, quiet = (replace(one, options=_in_microbatches(one.options)) for one in (case, quiet))
    has_cube, once = prod(case.topology.cube) > 1, _runs_step_once(case)
    of_layout = quiet if has_cube or once else case
    notes += _notes(case, quiet, whole, noise)

    def on_layout(case: Case) -> Results:
        tell(f"the layout: {counted(case.topology.world_size, 'process')}")
        return run(case.topology.world_size, run_rank, case)

    ranks = on_layout(of_layout)
    failures = [rank for rank in ranks if isinstance(rank, RankFailure)]
    if failures:
        return verdict_of_failure(failures, notes)
    layout = [rank for rank in ranks if isinstance(rank, RankResult)]
    notes += tuple(dict.fromkeys(text for rank in layout for text in rank.warnings))
    num, values = layout[0].num_microbatches, merge(layout, case.topology)
    tolerance = ROUNDED if case.dtype != torch.float64 or whole.has_rounded else EXACT
    pieces = whole.values if once else values[0]
    if not once and case.topology.replica_size > 1:  # else the layout itself trains uncut models
        pieces = micro_batches(of_layout)
    compared = compare(pieces, values, tolerance)
    verdict = verdict_of_layout(compared, layout[0], has_cube=has_cube, notes=notes)
    if once and compared.is_exact:
        return replace(verdict, microbatches=compared)
    if once and case.options.step == "auto":  # no rule was found, and the whole batch can't make up for it
        pieces = micro_batches(of_layout)
        compared = compare(pieces, values, tolerance)
        verdict = (
            verdict_of_layout(compared, layout[0], has_cube=has_cube, notes=notes) if compared.is_exact else verdict
        )
    cause = next((text for text in notes if NO_ENTRIES in text or OF_MICROBATCHES in text), "").partition(". ")[0]
    if once and cause and not compared.is_exact:  # are pipeline and cube right, and only the means another loss?
        in_pieces = replace(of_layout, options=_in_microbatches(case.options))
        results = [one for one in on_layout(in_pieces) if isinstance(one, RankResult)]
        if (
            len(results) == len(ranks)
            and (right := compare(micro_batches(in_pieces), merge(results, case.topology), tolerance)).is_exact
        ):
            whole_batches_differ = compare(whole.values, values, tolerance)
            summary = f"{summary_of_microbatches(whole_batches_differ)}: {cause}"
            return Verdict("depends on micro-batches", summary, STORED_MEANS, right, whole_batches_differ, notes)
    if noise and has_cube and not compared.is_exact:
        return Verdict("refused", f"refused: {noise} {CUBE_DRAWS}", notes=notes)
    if not compared.is_exact or noise:
        return verdict

    if of_layout is not quiet:
        pieces = micro_batches(quiet)
    cut = compare(whole.values, [pieces], tolerance)
    if cut.is_exact:
        return replace(verdict, microbatches=cut)
    summary = summary_of_microbatches(cut)
    return Verdict("depends on micro-batches", summary, MICROBATCHES_DIFFER, verdict.layout, cut, notes)


def _uncut(case: Case, num_microbatches: int) -> Case:
    """The same training on the same micro-batches, by data ranks that hold the whole model each."""
    plain: dict[str, Any] = {"num_waves": "auto", "schedule": "auto", "balance": "parameters", "recompute": "none"}
    plain |= {"activation_budget": None, "costs": None, "pairs": False, "shard_optimizer": False}
    plain |= {"cube_outside": "share", "num_microbatches": num_microbatches}
    options = replace(_in_microbatches(case.options), **plain)
    return replace(case, topology=Topology(data=case.topology.data), options=options)


def _in_microbatches(options: Options) -> Options:
    """The options of steps that run once for each micro-batch."""
    rule = "samples" if options.loss_weight == "auto" else options.loss_weight
    return replace(options, step="microbatch", loss_weight=rule)


def _runs_step_once(case: Case) -> bool:
    """Whether the layout's steps run on whole batches, and so are compared with those of one process."""
    options = case.options
    finds_out = options.step == "auto" and options.loss_weight == "auto"
    return case.topology.replica_size > 1 and (options.step == "batch" or finds_out)


def _notes(case: Case, quiet: Case, whole: RankResult, noise: str) -> tuple[str, ...]:
    notes = []
    if noise:
        what = "draws random numbers besides dropout: whole batches and micro-batches weren't compared"
        notes.append(f"{noise} {what}")
    elif quiet is not case:
        if prod(case.topology.cube) > 1:
            notes.append("dropout was off: the ranks of a cube draw masks of their own")
        elif _runs_step_once(case):
            notes.append("dropout was off: the masks of blocks are those of micro-batches")
        else:
            notes.append("dropout was off where micro-batches were compared with whole batches")
    if whole.has_rounded and case.dtype == torch.float64:
        notes.append("the module rounds to a lower precision in places: compared with the tolerance of fp32")
    return tuple(notes)

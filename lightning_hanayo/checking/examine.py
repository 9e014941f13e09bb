"""Trains a case three ways, and compares them: whole batches, micro-batches on uncut models, and the layout.

whole batches  <->  micro-batches    does the loss survive being cut?      one process, a plain Trainer
micro-batches  <->  the layout       are pipeline and cube right?          a process for each data rank, the strategy

Dropout draws its masks per micro-batch, so it is switched off where whole batches are compared. The layout keeps it,
and uncut models draw the same masks; but not in a cube, whose ranks draw their own.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch

from lightning_hanayo.checking.case import Case, RankFailure, RankResult, Results, Run
from lightning_hanayo.checking.comparison import EXACT, ROUNDED, Values, compare
from lightning_hanayo.checking.trainings.layout import merge, run_rank
from lightning_hanayo.checking.trainings.reference import run_reference
from lightning_hanayo.checking.verdict import (
    CUBE_DRAWS,
    MICROBATCHES_DIFFER,
    STORED_MEANS,
    Verdict,
    summary_of_microbatches,
    verdict_of_failure,
    verdict_of_layout,
)
from lightning_hanayo.errors import HanayoError, counted
from lightning_hanayo.pipeline_parallel.capture.whole_step import NO_ENTRIES
from lightning_hanayo.strategy.options import Options
from lightning_hanayo.strategy.setup.checks import OF_MICROBATCHES
from lightning_hanayo.topology import Topology

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

"""Trains a case three ways, and compares them: whole batches, micro-batches in one process, and the layout.

whole batches  <->  micro-batches    does the loss survive being cut?
micro-batches  <->  the layout       is the layout right?

Dropout draws its masks per micro-batch, so it is switched off where whole batches are compared. The layout keeps it,
and one process draws the same masks; but not in a cube, whose ranks draw their own.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import torch

from lightning_hanayo.checking.case import Case, RankFailure, RankResult, Run
from lightning_hanayo.checking.comparison import EXACT, ROUNDED, compare
from lightning_hanayo.checking.trainings.layout import merge, run_rank
from lightning_hanayo.checking.trainings.reference import run_reference
from lightning_hanayo.checking.verdict import (
    MICROBATCHES_DIFFER,
    Verdict,
    summary_of_microbatches,
    verdict_of_failure,
    verdict_of_layout,
)
from lightning_hanayo.errors import HanayoError

Tell = Callable[[str], None]
"""Is told which run begins."""


def examine(case: Case, run: Run, tell: Tell = lambda _: None, notes: tuple[str, ...] = ()) -> Verdict:
    """Check a case. `run` runs functions on ranks: `processes.run`, or a test's.

    Raises:
        HanayoError: the module doesn't train in one process.
    """

    def one_process(case: Case, num_microbatches: int) -> RankResult:
        what = f"{num_microbatches} micro-batches" if num_microbatches > 1 else "whole batches"
        tell(f"one process: {what}{'' if case.has_dropout else ', without dropout'}")
        (result,) = run(1, run_reference, case, num_microbatches)
        if isinstance(result, RankFailure):
            raise HanayoError(f"the module fails in one process, on {what}: {result.kind}: {result.message}")
        return result

    whole = one_process(case, 1)
    quiet, has_noise = case, False
    if whole.draws_numbers:
        quiet = replace(case, has_dropout=False)
        whole = one_process(quiet, 1)
        has_noise = whole.draws_numbers
    has_cube, once = prod(case.topology.cube) > 1, _runs_step_once(case)
    of_layout = quiet if has_cube or once else case
    notes += _notes(case, quiet, whole, has_noise=has_noise)

    tell(f"the layout: {case.topology.world_size} processes")
    ranks = run(case.topology.world_size, run_rank, of_layout)
    failures = [rank for rank in ranks if isinstance(rank, RankFailure)]
    if failures:
        return verdict_of_failure(failures, notes)
    layout = [rank for rank in ranks if isinstance(rank, RankResult)]
    notes += tuple(dict.fromkeys(text for rank in layout for text in rank.warnings))
    num = layout[0].num_microbatches
    pieces = whole if once else one_process(of_layout, num)
    tolerance = ROUNDED if case.dtype != torch.float64 or whole.has_rounded or pieces.has_rounded else EXACT
    compared = compare(pieces.values, merge(layout, case.topology), tolerance)
    verdict = verdict_of_layout(compared, layout[0], has_cube=has_cube, notes=notes)
    if not compared.is_exact or has_noise:
        return verdict
    if once:
        return replace(verdict, microbatches=compared)

    if of_layout is not quiet:
        pieces = one_process(quiet, num)
    cut = compare(whole.values, [pieces.values], tolerance)
    if cut.is_exact:
        return replace(verdict, microbatches=cut)
    return replace(
        verdict,
        outcome="depends on micro-batches",
        summary=summary_of_microbatches(cut),
        detail=MICROBATCHES_DIFFER,
        microbatches=cut,
    )


def _runs_step_once(case: Case) -> bool:
    """Whether the layout's steps run on whole batches, and so are compared with those of one process."""
    options, has_cube = case.options, prod(case.topology.cube) > 1
    finds_out = options.step == "auto" and options.loss_weight == "auto" and not has_cube
    return case.topology.replica_size > 1 and (options.step == "batch" or finds_out)


def _notes(case: Case, quiet: Case, whole: RankResult, *, has_noise: bool) -> tuple[str, ...]:
    notes = []
    if has_noise:
        notes.append("the step draws random numbers besides dropout: whole batches and micro-batches weren't compared")
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

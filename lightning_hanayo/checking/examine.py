"""Trains a case three ways, and compares them: whole batches, micro-batches in one process, and the layout.

whole batches  <->  micro-batches    does the loss survive being cut? If not, which loss_weight makes it?
micro-batches  <->  the layout       is the layout right?

Dropout draws its masks per micro-batch, so it is switched off where whole batches are compared. The layout keeps it,
and one process draws the same masks; but not in a cube, whose ranks draw their own.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import nn

from lightning_hanayo.checking.case import Case, RankFailure, RankResult, Run
from lightning_hanayo.checking.comparison import EXACT, ROUNDED, Comparison, compare
from lightning_hanayo.checking.trainings.layout import merge, run_rank
from lightning_hanayo.checking.trainings.reference import run_reference
from lightning_hanayo.checking.verdict import (
    Place,
    Verdict,
    stored_by_blocks,
    verdict_of_failure,
    verdict_of_layout,
    verdict_of_microbatches,
)
from lightning_hanayo.errors import HanayoError

LOSS_WEIGHTS = ("samples", "tokens", "shifted_tokens", "sum")
Tell = Callable[[str], None]
"""Is told which run begins."""


def examine(case: Case, run: Run, tell: Tell = lambda _: None, notes: tuple[str, ...] = ()) -> Verdict:
    """Check a case. `run` runs functions on ranks: `processes.run`, or a test's.

    Raises:
        HanayoError: the module doesn't train in one process.
    """
    runs = _Runs(case, run, tell)
    whole = runs.one_process(case, 1)
    quiet, has_noise = case, False
    if whole.draws_numbers:
        quiet = replace(case, has_dropout=False)
        whole = runs.one_process(quiet, 1)
        has_noise = whole.draws_numbers
    of_layout = quiet if prod(case.topology.cube) > 1 else case
    notes += _notes(case, quiet, whole, has_noise=has_noise)

    ranks = runs.layout(of_layout)
    failures = [rank for rank in ranks if isinstance(rank, RankFailure)]
    if failures:
        return _verdict_of_failure(runs, of_layout, failures, whole, notes)
    layout = [rank for rank in ranks if isinstance(rank, RankResult)]
    notes += tuple(dict.fromkeys(text for rank in layout for text in rank.warnings))
    num = layout[0].num_microbatches
    pieces = runs.one_process(of_layout, num)
    has_cube = prod(case.topology.cube) > 1
    shares_samples = has_cube and case.options.cube_outside == "share"
    place = Place(layout[0].stack, layout[0].stages, has_cube, shares_samples)
    compared = runs.compared(pieces, *merge(layout, case.topology))
    verdict = verdict_of_layout(compared, place, pieces, notes)
    if not compared.is_exact or has_noise:
        return verdict

    if of_layout is not quiet:
        pieces = runs.one_process(quiet, num)
    cut = runs.compared(whole, pieces.values)
    if cut.is_exact:
        return replace(verdict, microbatches=cut)
    options = {} if cut.trains_alike else _try_options(runs, quiet, num, whole)
    return verdict_of_microbatches(verdict, cut, options, _batch_norms(case.module))


class _Runs:
    """Runs one case in several ways."""

    def __init__(self, case: Case, run: Run, tell: Tell) -> None:
        self._run, self._tell = run, tell
        self._rule = case.options.loss_weight
        self._tolerance = EXACT if case.dtype == torch.float64 else ROUNDED

    def one_process(self, case: Case, num_microbatches: int, rule: Any = None) -> RankResult:
        what = f"{num_microbatches} micro-batches" if num_microbatches > 1 else "whole batches"
        weighed = f" with loss_weight={rule!r}" if rule is not None else ""
        self._tell(f"one process: {what}{weighed}{'' if case.has_dropout else ', without dropout'}")
        (result,) = self._run(1, run_reference, case, num_microbatches, rule or self._rule)
        if isinstance(result, RankFailure):
            raise HanayoError(f"the module fails in one process, on {what}: {result.kind}: {result.message}")
        if result.has_rounded:
            self._tolerance = ROUNDED
        return result

    def layout(self, case: Case) -> list[RankResult | RankFailure]:
        self._tell(f"the layout: {case.topology.world_size} processes")
        return self._run(case.topology.world_size, run_rank, case)

    def compared(self, expected: RankResult, *actual: Any) -> Comparison:
        return compare(expected.values, actual, self._tolerance, expected.forward_order)


def _try_options(runs: _Runs, case: Case, num: int, whole: RankResult) -> dict[str, Comparison | str]:
    """Really train with each other loss_weight that the strategy accepts."""
    found: dict[str, Comparison | str] = {}
    for rule in LOSS_WEIGHTS:
        if rule == case.options.loss_weight or not _is_accepted(case, rule):
            continue
        try:
            pieces = runs.one_process(case, num, rule)
            # Data ranks are weighed by the rule, too.
            of_rule = runs.one_process(case, 1, rule) if case.topology.data > 1 else whole
            found[rule] = runs.compared(of_rule, pieces.values)
        except HanayoError as error:
            found[rule] = str(error)
    return found


def _verdict_of_failure(
    runs: _Runs, case: Case, failures: list[RankFailure], whole: RankResult, notes: tuple[str, ...]
) -> Verdict:
    """The module may fail on micro-batches in one process, too: BatchNorm on a single sample."""
    verdict = verdict_of_failure(failures, notes)
    if verdict.outcome == "refused":
        return verdict
    wanted = case.options.num_microbatches
    try:
        runs.one_process(case, wanted if isinstance(wanted, int) else 2 * case.topology.pipe)
    except HanayoError as error:
        return replace(verdict, outcome="depends on micro-batches", summary=str(error), trace="")
    return replace(verdict, cause=stored_by_blocks(whole.changed_attributes, whole.stack))


def _notes(case: Case, quiet: Case, whole: RankResult, *, has_noise: bool) -> tuple[str, ...]:
    notes = []
    if has_noise:
        notes.append("the step draws random numbers besides dropout: whole batches and micro-batches weren't compared")
    elif quiet is not case:
        is_cube = prod(case.topology.cube) > 1
        notes.append(
            "dropout was off: the ranks of a cube draw masks of their own"
            if is_cube
            else "dropout was off where micro-batches were compared with whole batches"
        )
    if whole.has_rounded and case.dtype == torch.float64:
        notes.append("the module rounds to a lower precision in places: compared with the tolerance of fp32")
    return tuple(notes)


def _is_accepted(case: Case, rule: Any) -> bool:
    try:
        replace(case.options, loss_weight=rule)
    except HanayoError:
        return False
    return True


def _batch_norms(module: nn.Module) -> tuple[str, ...]:
    """The names of modules with statistics over a batch. None are known before `configure_model`."""
    return tuple(name for name, part in module.named_modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))

"""Passes that keep a part of a table: some forwards only, all but some forwards, the first micro-batches only."""

from collections.abc import Callable, Container
from dataclasses import replace
from typing import TypeVar

from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.passes.communication import reduction_order
from lightning_hanayo.schedule.table import Table

AnyTable = TypeVar("AnyTable", bound=Table)


def forward_only(schedule: AnyTable, microbatches: Container[int | None] | None = None) -> AnyTable:
    """The forwards alone, of `microbatches` or of all, for validation and prediction. None waits for a backward."""
    return _only(schedule, lambda a: a.kind is Kind.F and (microbatches is None or a.microbatch in microbatches))


def without_forwards(schedule: AnyTable, microbatches: Container[int | None]) -> AnyTable:
    """The same schedule without the forwards of `microbatches`, which have run before."""
    return _only(schedule, lambda action: action.kind is not Kind.F or action.microbatch not in microbatches)


def last_backward_only(schedule: AnyTable, microbatches: Container[int | None]) -> AnyTable:
    """The last stage's backwards of `microbatches` alone, for steps whose gradients don't reach the stack."""
    last = schedule.num_stages - 1
    return _only(schedule, lambda a: a.stage == last and a.kind is not Kind.F and a.microbatch in microbatches)


def first_microbatches(schedule: AnyTable, num_microbatches: int) -> AnyTable:
    """The same schedule for a smaller batch: without the micro-batches beyond the last one.

    Reductions keep the order of the whole schedule: another data rank may run more micro-batches at the same time.
    """
    rows = tuple(
        tuple(action for action in row if action.microbatch is None or action.microbatch < num_microbatches)
        for row in schedule.actions
    )
    order = reduction_order(schedule)
    made = replace(schedule, actions=rows, num_microbatches=num_microbatches, reduction_order=order)
    return _with_whole_pairs(made)


def _only(schedule: AnyTable, keeps: Callable[[Action], bool]) -> AnyTable:
    made = replace(schedule, actions=tuple(tuple(filter(keeps, row)) for row in schedule.actions))
    return _with_whole_pairs(made)


def _with_whole_pairs(schedule: AnyTable) -> AnyTable:
    """The same without the pairs of which an action was left out."""
    if not schedule.pairs:
        return schedule
    held = {action for row in schedule.actions for action in row}
    return replace(schedule, pairs=frozenset(pair for pair in schedule.pairs if held.issuperset(pair)))

"""Passes that keep a part of a table: the forwards only, or the first micro-batches only."""

from dataclasses import replace
from typing import TypeVar

from lightning_hanayo.schedule.action import Kind
from lightning_hanayo.schedule.passes.communication import reduction_order
from lightning_hanayo.schedule.table import Table

AnyTable = TypeVar("AnyTable", bound=Table)


def forward_only(schedule: AnyTable) -> AnyTable:
    """The same schedule without its backwards, for validation and prediction. No forward waits for a backward."""
    rows = tuple(tuple(action for action in row if action.kind is Kind.F) for row in schedule.actions)
    return replace(schedule, actions=rows)


def first_microbatches(schedule: AnyTable, num_microbatches: int) -> AnyTable:
    """The same schedule for a smaller batch: without the micro-batches beyond the last one.

    Reductions keep the order of the whole schedule: another data rank may run more micro-batches at the same time.
    """
    rows = tuple(
        tuple(action for action in row if action.microbatch is None or action.microbatch < num_microbatches)
        for row in schedule.actions
    )
    order = reduction_order(schedule)
    return replace(schedule, actions=rows, num_microbatches=num_microbatches, reduction_order=order)

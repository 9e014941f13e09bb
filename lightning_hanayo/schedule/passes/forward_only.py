"""The forward-only schedule: what validation and prediction play."""

from dataclasses import replace

from lightning_hanayo.schedule.action import Kind
from lightning_hanayo.schedule.table import Schedule


def forward_only(schedule: Schedule) -> Schedule:
    """The same schedule without its backwards: what is left of a valid order is a valid order."""
    rows = tuple(tuple(action for action in row if action.kind is Kind.F) for row in schedule.actions)
    return replace(schedule, actions=rows)

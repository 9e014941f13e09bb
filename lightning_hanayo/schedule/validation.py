"""Validation: is a table a schedule?"""

from lightning_hanayo.schedule.table import Schedule


def validate(schedule: Schedule) -> None:
    """Placeholder until the checks land."""


def check_budget(schedule: Schedule, activation_budget: float) -> None:
    """Placeholder until the checks land."""

"""Schedules: which pipeline rank runs which action in which order. Standard library only."""

from lightning_hanayo.schedule import builders  # noqa: F401 - registers the builders
from lightning_hanayo.schedule.communication import (
    complete,
    forward_only,
    last_backward_only,
    reduction_order,
    with_loss_stage,
    without_forwards,
)
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.passes.validation import validate
from lightning_hanayo.schedule.registry import Request, build, register_schedule, schedule_names
from lightning_hanayo.schedule.schedule import Schedule
from lightning_hanayo.schedule.simulate import Span, Timeline, simulate
from lightning_hanayo.schedule.table import Action, Kind, waits_for
from lightning_hanayo.schedule.text import timeline_text

__all__ = [
    "Action", "CostModel", "Kind", "Request", "Schedule", "Span", "Timeline", "build",
    "complete", "forward_only", "last_backward_only", "reduction_order", "register_schedule", "schedule_names",
    "simulate", "timeline_text", "validate", "waits_for", "with_loss_stage", "without_forwards",
]  # fmt: skip

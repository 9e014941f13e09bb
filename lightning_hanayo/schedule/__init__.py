"""Schedules: what happens when on which pipeline rank. Standard library only."""

from lightning_hanayo.schedule import (  # noqa: F401 - they register themselves
    chimera,
    gpipe,
    hanayo,
    hanayo_zb,
    interleaved,
    interleaved_zb,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zbv,
)
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.auto import build
from lightning_hanayo.schedule.communication import complete, reduction_order
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.dependency import waits_for
from lightning_hanayo.schedule.forward_only import forward_only
from lightning_hanayo.schedule.loss_stage import with_loss_stage
from lightning_hanayo.schedule.memory import MemoryModel, RankMemory
from lightning_hanayo.schedule.registry import Request, register_schedule, schedule_names
from lightning_hanayo.schedule.simulation import simulate
from lightning_hanayo.schedule.table import Schedule
from lightning_hanayo.schedule.text import schedule_text, timeline_text
from lightning_hanayo.schedule.timeline import Span, Timeline
from lightning_hanayo.schedule.validation import validate

__all__ = [
    "Action",
    "CostModel",
    "Kind",
    "MemoryModel",
    "RankMemory",
    "Request",
    "Schedule",
    "Span",
    "Timeline",
    "build",
    "complete",
    "forward_only",
    "reduction_order",
    "register_schedule",
    "schedule_names",
    "schedule_text",
    "simulate",
    "timeline_text",
    "validate",
    "waits_for",
    "with_loss_stage",
]

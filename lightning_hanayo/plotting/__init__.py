"""Pictures of timelines and schedules. matplotlib is loaded by the first picture, torch never."""

from lightning_hanayo.plotting.picture import save_comparison, save_schedule, save_timeline
from lightning_hanayo.plotting.rows import draw_timeline

__all__ = ["draw_timeline", "save_comparison", "save_schedule", "save_timeline"]

"""Draws timelines, schedules and layouts. matplotlib is imported when the first image is drawn, torch never."""

from lightning_hanayo.plotting.layouts import save_ranking
from lightning_hanayo.plotting.pages import save_page
from lightning_hanayo.plotting.timeline import chrome_trace, save_comparison, save_timeline, save_trace

__all__ = ["chrome_trace", "save_comparison", "save_page", "save_ranking", "save_timeline", "save_trace"]

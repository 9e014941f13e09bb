"""Pictures of timelines, schedules and cubes. matplotlib is loaded by the first picture, torch never."""

from lightning_hanayo.plotting.cube import save_cube
from lightning_hanayo.plotting.page import save_page
from lightning_hanayo.plotting.picture import save_comparison, save_schedule, save_timeline
from lightning_hanayo.plotting.ranking import save_ranking
from lightning_hanayo.plotting.rows import draw_timeline
from lightning_hanayo.plotting.trace import chrome_trace, save_trace

__all__ = [
    "chrome_trace",
    "draw_timeline",
    "save_comparison",
    "save_cube",
    "save_page",
    "save_ranking",
    "save_schedule",
    "save_timeline",
    "save_trace",
]

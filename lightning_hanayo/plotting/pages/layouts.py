"""The page of a plan: time over memory of all layouts, each by its name, and the table of the fastest, which sorts."""

from collections.abc import Sequence
from pathlib import Path

from lightning_hanayo.plotting.layouts import FRONTIER, NUMBERED, POINT, Dot, worth_showing
from lightning_hanayo.plotting.pages.filled import save_filled


def save_layouts_page(
    path: str | Path,
    dots: Sequence[Dot],
    numbered: Sequence[Dot],
    *,
    limit: float,
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> None:
    """Write the page.

    Args:
        path: the file, usually ending in .html.
        dots: all layouts that fit.
        numbered: those of the table, in its order.
        limit: bytes that a device has for them.
        title: at the top.
        columns: of the table.
        rows: of the table, one for each of `numbered`.

    Raises:
        HanayoError: the file can't be written.
    """
    shown = worth_showing(dots, numbered)
    data = {
        "limit": limit / 1e9,
        "count": len(dots),
        "colours": {"point": POINT, "frontier": FRONTIER, "numbered": NUMBERED},
        "dots": [_dot(one) for one in shown],
        "frontier": [_dot(one)[:2] for one in shown if one.is_on_frontier],
        "numbered": [_dot(one) for one in numbered],
        "columns": list(columns),
        "rows": [list(row) for row in rows],
    }
    save_filled(path, "layouts.html", title, data)


def _dot(one: Dot) -> tuple[float, float, str]:
    """Gigabytes, seconds, name."""
    return float(f"{one.num_bytes / 1e9:.4g}"), float(f"{one.seconds:.5g}"), one.name

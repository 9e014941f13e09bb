"""Text: a schedule drawn in a terminal, as a table (what stands where) or over time (idle visible)."""

from collections.abc import Sequence

from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.simulation import simulate
from lightning_hanayo.schedule.table import Schedule
from lightning_hanayo.schedule.timeline import Span, Timeline


def schedule_text(schedule: Schedule, costs: CostModel | None = None, columns: int | None = None) -> str:
    """The schedule over time under `costs`, a row per rank.

    Example:
        >>> print(schedule_text(build("1f1b", num_ranks=2, num_microbatches=2)))
        rank 0  F0 F1 ......B0    ...B1
        rank 1  ...F0 B0    F1 B1    ......
    """
    return timeline_text(simulate(schedule, costs), columns)


def timeline_text(timeline: Timeline, columns: int | None = None) -> str:
    """The timeline, a row per rank: kind and micro-batch at each action's start, dots where the rank is idle.

    Args:
        timeline: simulated or measured.
        columns: the most characters per row; None: as many as every label needs. In too few, labels are cut short.
    """
    compute = [span for span in timeline.spans if span.action.kind.is_compute and span.end > span.start]
    if not compute:
        return ""
    margin = len(f"rank {timeline.num_ranks - 1}") + 2
    label = max(len(_label(span)) for span in compute)
    scale = (label + 1) / min(span.end - span.start for span in compute)
    if columns is not None:
        scale = min(scale, (columns - margin) / timeline.makespan)
    width = max(1, round(timeline.makespan * scale))
    rows = []
    for rank in range(timeline.num_ranks):
        spans = [span for span in compute if span.rank == rank]
        rows.append(f"{f'rank {rank}':<{margin}}{_row(spans, timeline.begin, scale, width)}")
    return "\n".join(rows)


def _row(spans: Sequence[Span], begin: float, scale: float, width: int) -> str:
    cells = ["."] * width
    for span in spans:
        first, last = (min(width, round((time - begin) * scale)) for time in (span.start, span.end))
        text = _label(span) if last - first > len(_label(span)) else _label(span)[: max(1, last - first)]
        cells[first:last] = text.ljust(last - first)[: last - first]
    return "".join(cells).rstrip()


def _label(span: Span) -> str:
    return f"{span.action.kind}{span.action.microbatch}"

"""Figures: what a schedule costs, for people and as JSON."""

from typing import Any

from lightning_hanayo.schedule import Kind, Schedule, Timeline
from lightning_hanayo.schedule.simulation.comparison import messages_per_microbatch


def figures(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """Sizes and figures of a schedule that ran as `timeline`."""
    result = {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "stage_ranks": list(schedule.stage_ranks),
        "copies_of_the_model": schedule.num_chains,
        "backward": backward(schedule),
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "peak_activations": list(timeline.peak_activations),
        "messages_per_microbatch": messages_per_microbatch(schedule),
    }
    if timeline.num_steps > 1:
        result |= {"step_times": list(timeline.step_times), "step_bubbles": list(timeline.step_bubbles)}
    return result


def backward(schedule: Schedule) -> str:
    """How the backward runs: in one piece, split, both, or not at all.

    Example:
        >>> backward(build("1f1b", num_ranks=2, num_microbatches=2))
        'whole'
    """
    kinds = {action.kind for row in schedule.actions for action in row}
    match Kind.B in kinds, Kind.I in kinds:
        case True, False:
            return "whole"
        case False, True:
            return "split"
        case True, True:
            return "whole and split"
        case _:
            return "none"


def sentence(schedule: Schedule, timeline: Timeline, unit: str) -> str:
    """The figures in one line."""
    peaks = timeline.peak_activations
    most = max(peaks)
    where = "every rank" if min(peaks) == most else f"rank {peaks.index(most)}"
    parts = [
        f"makespan {timeline.makespan:.6g} {unit}".rstrip(),
        f"bubble {timeline.bubble_ratio:.1%}",
        f"peak activations {most:.4g} M_a ({where})",
        f"{messages_per_microbatch(schedule):g} messages per micro-batch",
    ]
    if timeline.num_steps > 1:
        parts.append(f"last step {timeline.step_times[-1]:.6g}, bubble {timeline.step_bubbles[-1]:.1%}")
    return "; ".join(parts)

"""Summarizes a schedule and its timeline, in words and as JSON."""

from typing import Any

from lightning_hanayo.schedule import Kind, Schedule, Timeline
from lightning_hanayo.schedule.passes.communication import messages_per_microbatch


def title(schedule: Schedule) -> str:
    """The name and the sizes of a schedule: "hanayo: 4 ranks, 2 stages per rank, 8 micro-batches"."""
    return f"{schedule.name}: {sizes_text(schedule)}"


def sizes_text(schedule: Schedule) -> str:
    """The sizes of a schedule in words."""
    num_stages = sorted({len(schedule.stages_of(rank)) for rank in range(schedule.num_ranks)})
    stages = f"{schedule.num_stages} stages"
    if len(num_stages) == 1:
        stages = f"{num_stages[0]} stage{'s' * (num_stages[0] != 1)} per rank"
    return f"{schedule.num_ranks} ranks, {stages}, {schedule.num_microbatches} micro-batches"


def summary_line(schedule: Schedule, timeline: Timeline, unit: str) -> str:
    """Makespan, bubble, peak activations and messages, in one line."""
    peaks = timeline.peak_activations
    peak = max(peaks)
    where = "every rank" if min(peaks) == peak else f"rank {peaks.index(peak)}"
    parts = [
        f"makespan {timeline.makespan:.6g} {unit}".rstrip(),
        f"bubble {timeline.bubble_ratio:.1%}",
        f"peak activations {peak:.4g} M_a ({where})",
        f"{messages_per_microbatch(schedule)} messages per micro-batch",
    ]
    if timeline.num_steps > 1:
        parts.append(f"last step {timeline.step_times[-1]:.6g}, bubble {timeline.step_bubbles[-1]:.1%}")
    return "; ".join(parts)


def summary_dict(schedule: Schedule, timeline: Timeline) -> dict[str, Any]:
    """The sizes of a schedule and the results of its simulation, for JSON."""
    result = {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_stages": schedule.num_stages,
        "num_microbatches": schedule.num_microbatches,
        "stage_ranks": list(schedule.stage_ranks),
        "backward": backward_mode(schedule),
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "peak_activations": list(timeline.peak_activations),
        "messages_per_microbatch": messages_per_microbatch(schedule),
    }
    if timeline.num_steps > 1:
        result |= {"step_times": list(timeline.step_times), "step_bubbles": list(timeline.step_bubbles)}
    return result


def backward_mode(schedule: Schedule) -> str:
    """Whether the backward runs in one piece ("whole"), in two ("split"), both, or not at all ("none")."""
    kinds = {action.kind for row in schedule.actions for action in row}
    return " and ".join(name for kind, name in ((Kind.B, "whole"), (Kind.I, "split")) if kind in kinds) or "none"

"""Draws a V's timeline as the papers do: each cell has the kind, the stage (0 down, 1 up) and the micro-batch."""

from lightning_hanayo.schedule import Schedule, simulate


def drawn(schedule: Schedule) -> list[str]:
    """A line per rank, for costs F = I = W and two stages per rank.

    Example:
        >>> drawn(build("v-min", num_ranks=1, num_microbatches=1))
        ['F00 F10 I10 I00 W10 W00']
    """
    timeline = simulate(schedule)
    lines = [["..."] * round(2 * timeline.makespan) for _ in schedule.actions]
    for span in timeline.spans:
        leg = int(span.action.stage >= schedule.num_ranks)
        lines[span.rank][round(2 * span.start)] = f"{span.action.kind}{leg}{span.action.microbatch}"
    return [" ".join(line) for line in lines]

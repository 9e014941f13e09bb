"""A V's timeline as the papers draw it: cells of what is done for stage 0 (on the way down) or 1, which micro-batch."""

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

"""Converts the times of all ranks to rank 0's clock: the clocks of different machines do not start together.

No message can be received before it was sent. If rank 1's times plus `offset` are rank 0's:

    rank 0   0F0 |e -------.                .------> s| 0B0      e <= s' + offset,  e' + offset <= s
    rank 1                  `-> s'| ... |e'                      so  e - s' <= offset <= s - e', for every message
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from math import inf

from lightning_hanayo.runtime.profiling.measurement import MessageTiming, message_timings
from lightning_hanayo.runtime.profiling.trace import BatchTrace
from lightning_hanayo.schedule import Schedule


def on_one_clock(schedule: Schedule, batch: BatchTrace) -> BatchTrace:
    """Return the batch with all times on rank 0's clock.

    Processes on one machine share a clock: an offset of 0 is possible there, and the times stay as they are. Across
    machines each rank's clock is set relative to the rank before it, to the middle of what the batch's messages allow.
    The error is at most half the time that the two fastest messages, one in each direction, took together.
    """
    return [
        [replace(e, reached=e.reached + offset, start=e.start + offset, end=e.end + offset) for e in events]
        if offset
        else events
        for events, offset in zip(batch, offsets(len(batch), message_timings(schedule, batch)), strict=True)
    ]


def offsets(num_ranks: int, messages: Iterable[MessageTiming]) -> list[float]:
    """Return the seconds to add to each rank's times."""
    least: dict[tuple[int, int], float] = defaultdict(lambda: -inf)
    for one in messages:
        pair = (one.sender, one.receiver)
        least[pair] = max(least[pair], one.sent.end - one.received.start)
    return list(accumulate((_between(least[r - 1, r], -least[r, r - 1]) for r in range(1, num_ranks)), initial=0.0))


def _between(low: float, high: float) -> float:
    """Return 0 if it is possible, or if messages went in one direction only; otherwise the middle."""
    return 0.0 if low <= 0.0 <= high or inf in (-low, high) else (low + high) / 2

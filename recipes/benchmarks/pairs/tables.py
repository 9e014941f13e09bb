"""The schedules that are compared: the micro-batches of one rank one by one, and in pairs.

one by one    F0 B0 F1 B1 F2 B2 F3 B3
F+B           F0 | F1+B0 | F2+B1 | F3+B2 | B3
"""

from lightning_hanayo.schedule import Action, Kind, Schedule

ALONE, STEADY = "one by one", "F+B"
WAYS = ALONE, STEADY


def table_of(way: str, num_microbatches: int) -> Schedule:
    """The schedule of one rank, whose only stage is the whole model."""
    forward, backward = ([Action(0, kind, m) for m in range(num_microbatches)] for kind in (Kind.F, Kind.B))
    pairs: list[tuple[Action, Action]] = []
    row: list[Action] = []
    if way == ALONE:
        row = [one for both in zip(forward, backward, strict=True) for one in both]
    else:
        pairs = list(zip(forward[1:], backward, strict=False))
        row = [forward[0], *(one for pair in pairs for one in pair), backward[-1]]
    return Schedule(way, (0,), (tuple(row),), num_microbatches, pairs=frozenset(pairs))

"""Builds and simulates schedules with two copies of the model, one down and one up the ranks: Chimera and GEMS.

    down   stage r on rank r                 stages 0 to P-1     a micro-batch visits one of the two: so the package
    up     stage P + i on rank P-1-i         stages P to 2P-1    neither builds such tables nor trains with them

Chimera (SC'21, arXiv 2107.06925) at B = P = 4, drawn with T_B = T_F:

    rank 0   F0 .  F1 f2 b2 f3 b3 B0 .  B1          F, B: down
    rank 1      F0 f2 F1 f3 b2 B0 b3 B1             f, b: up
    rank 2      f2 F0 f3 F1 B0 b2 B1 b3
    rank 3   f2 .  f3 F0 B0 F1 B1 b2 .  b3

It is a 1f1b of half speed in each direction. In slots that hold a forward and then a backward, the i-th micro-batch
down runs forward on rank r in slot r + 2i and backward in slot 2P-2-r + 2i; up, the same from the other end. So a
rank's even slots belong to one direction and its odd ones to the other, and any B continues without a collision (the
paper runs units of P one after another instead, which idles in each of them unless T_B = T_F). For even B >= P:

    B (T_F + T_B) + (P-2) max(T_F, T_B) + (3P-4) T_C        at B = P one T_C less; for P = 2 always 2 T_C

GEMS (SC'20), one micro-batch at a time, P = 3:

    rank 0   F0 .  .  .   .   B0B0 F1 B1B1 F2
    rank 1      F0 .  .   B0B0 F1  .  .    B1B1 F2
    rank 2         F0 B0B0 F1  .   .  .    .    B1B1 F2 B2B2 ...

Even micro-batches run down, odd ones up. The next forward follows the backward in the same direction; only its last
step, on the last rank, delays the next backward.
"""

from lightning_hanayo.schedule import Action, Kind, Schedule, Span, Timeline
from lightning_hanayo.schedule.table import executable_order, waits_in
from recipes.paper.closed_form import Times


def chimera(num_ranks: int, num_microbatches: int) -> Schedule:
    """The table for an even number of ranks, so that no rank holds a stage and its copy."""
    assert num_ranks % 2 == 0
    rows = []
    for rank in range(num_ranks):
        slots: dict[tuple[int, bool], Action] = {}  # in a slot the forward comes first
        for microbatch in range(num_microbatches):
            up, item = _direction(microbatch, num_ranks, num_microbatches)
            position = num_ranks - 1 - rank if up else rank
            stage = num_ranks * up + position
            slots[2 * item + position, False] = Action(stage, Kind.F, microbatch)
            slots[2 * item + 2 * num_ranks - 2 - position, True] = Action(stage, Kind.B, microbatch)
        rows.append(tuple(slots[slot] for slot in sorted(slots)))
    return Schedule("chimera", _down_and_up(num_ranks), tuple(rows), num_microbatches)


def _direction(microbatch: int, num_ranks: int, num_microbatches: int) -> tuple[bool, int]:
    """Whether a micro-batch goes up, and how many before it do the same: of each P, the first half goes down."""
    unit, item = divmod(microbatch, num_ranks)
    down = (min(num_ranks, num_microbatches - unit * num_ranks) + 1) // 2
    return item >= down, unit * (num_ranks // 2) + item % down


def gems(num_ranks: int, num_microbatches: int) -> Schedule:
    """The table in which every rank runs F and B of each micro-batch in turn."""
    rows = tuple(
        tuple(
            Action(2 * num_ranks - 1 - rank if microbatch % 2 else rank, kind, microbatch)
            for microbatch in range(num_microbatches)
            for kind in (Kind.F, Kind.B)
        )
        for rank in range(num_ranks)
    )
    return Schedule("gems", _down_and_up(num_ranks), rows, num_microbatches)


SCHEDULES = {"chimera": chimera, "gems": gems}


def simulate_copies(schedule: Schedule, times: Times | None = None) -> Timeline:
    """The timeline by the rules of the package's `simulate`, which rejects micro-batches that leave out stages."""
    times = times or Times()
    rank_of = schedule.stage_ranks
    waits = waits_in(schedule.actions, schedule.num_stages)
    free, ends, spans = [0.0] * schedule.num_ranks, dict[Action, float](), []
    for action in executable_order(schedule.actions, waits):
        rank = rank_of[action.stage]
        arrivals = [ends[one] + times.message * (rank_of[one.stage] != rank) for one in waits[action]]
        start = max([free[rank], *arrivals])
        free[rank] = ends[action] = start + (times.forward if action.kind is Kind.F else times.backward)
        spans.append(Span(rank, action, start, free[rank]))
    return Timeline(tuple(spans), shares=(1.0,) * schedule.num_stages)  # a stage is a rank's share of its copy


def _down_and_up(num_ranks: int) -> tuple[int, ...]:
    return (*range(num_ranks), *reversed(range(num_ranks)))

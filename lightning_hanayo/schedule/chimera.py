"""chimera: two copies of the model, one down and one up the ranks, each at work in the other's bubbles (SC'21, arXiv
2107.06925). Weights 2 M_w, activations from (P/2 + 1) M_a on the first and last rank to P M_a in the middle.

B = P is the paper's order (figure 3), half of the micro-batches each way; here with T_B = T_F, P = 4:

    rank 0   F0 .  F1 f2 b2 f3 b3 B0 .  B1          F, B: down, stage r on rank r (0 to P-1)
    rank 1      F0 f2 F1 f3 b2 B0 b3 B1             f, b: up, stage P + i on rank P-1-i
    rank 2      f2 F0 f3 F1 B0 b2 B1 b3
    rank 3   f2 .  f3 F0 B0 F1 B1 b2 .  b3

On these slots the i-th micro-batch down runs forward on rank r at r + 2i and backward at 2P-1-r + 2i, and up the same
from the other end. A rank's odd slots belong to one way, its even ones to the other: nothing meets. A unit of P fills
2P slots of every rank, so the next unit follows 2P slots later (the paper's direct concatenation) and its forwards fill
the tail of the one before. For T_B >= T_F the makespan of U units, B = UP, is

    P T_F + (2P-2) T_B + (U-1) (2 T_F + (2P-2) T_B)            and at U = 1, P >= 4, another (3P-5) T_C

A rank works P (T_F + T_B) for a unit: with T_B = T_F it idles at both ends only, with T_B = 2 T_F in every unit, for
equal slots fit unequal work badly (the paper's remedies take twice the activations, or halve the micro-batches).
"""

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.table import Schedule


@register_schedule("chimera")
def chimera(request: Request) -> Schedule:
    """Two chains of P stages, for even P; any B."""
    request.refuse_waves()
    request.stages_per_rank(2, default=2)
    num_ranks = request.num_ranks
    if num_ranks % 2:
        raise HanayoError(
            f"schedule {request.name!r} needs an even number of ranks, so that no rank holds a stage and its twin: got "
            f"num_ranks={num_ranks}; take {num_ranks + 1}, or another schedule ('hanayo')"
        )
    down = tuple(range(num_ranks))
    rows = tuple(_row(rank, num_ranks, request.num_microbatches) for rank in range(num_ranks))
    twins = tuple((stage + num_ranks) % (2 * num_ranks) for stage in range(2 * num_ranks))
    return Schedule(request.name, down + down[::-1], rows, request.num_microbatches, replica_of=twins)


def _row(rank: int, num_ranks: int, num_microbatches: int) -> tuple[Action, ...]:
    """The rank's actions by the slots of the picture."""
    slots: dict[int, Action] = {}
    for microbatch in range(num_microbatches):
        up, begin = _entry(microbatch, num_ranks, num_microbatches)
        place = num_ranks - 1 - rank if up else rank
        stage = num_ranks * up + place
        slots[begin + place] = Action(stage, Kind.F, microbatch)
        slots[begin + 2 * num_ranks - 1 - place] = Action(stage, Kind.B, microbatch)
    return tuple(slots[slot] for slot in sorted(slots))


def _entry(microbatch: int, num_ranks: int, num_microbatches: int) -> tuple[bool, int]:
    """Whether a micro-batch goes up, and the slot in which it enters: the first half of its unit goes down."""
    unit, item = divmod(microbatch, num_ranks)
    down = (min(num_ranks, num_microbatches - unit * num_ranks) + 1) // 2
    return item >= down, 2 * (unit * num_ranks + item % down)

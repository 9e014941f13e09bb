"""chimera: two replicas of the model, one down and one up the ranks, which fill each other's bubbles, for any B.

SC'21, arXiv 2107.06925. Weights 2 M_w, activations at B = P from (P/2 + 1) M_a at both ends to P M_a in the middle.
B = P is the paper's order (figure 3), half of the micro-batches in each direction; P = 4, drawn with T_B = T_F:

    rank 0   F0 .  F1 f2 b2 f3 b3 B0 .  B1          F, B: down, stage r on rank r (0 to P-1)
    rank 1      F0 f2 F1 f3 b2 B0 b3 B1             f, b: up, stage P + i on rank P-1-i
    rank 2      f2 F0 f3 F1 B0 b2 B1 b3
    rank 3   f2 .  f3 F0 B0 F1 B1 b2 .  b3

It is a 1f1b of half speed in each direction. In slots that hold a forward and then a backward, the i-th micro-batch
down runs forward on rank r in slot r + 2i and backward in slot 2P-2-r + 2i; up, the same from the other end. So a
rank's even slots belong to one direction and its odd ones to the other, and any B continues without a collision:

    rank 1, B = 8   slot   1     2     3     4     5     6     7     8     9     10  ...
                           F0    f2    F1    f3b2  F4B0  f6b3  F5B1  f7b6  B4    b7          (F5B1: F5, then B1)

(The paper runs units of P one after another instead, which idles in each of them unless T_B = T_F.) No rank ever holds
more than P M_a. For even B >= P the makespan is

    B (T_F + T_B) + (P-2) max(T_F, T_B) + (3P-4) T_C        at B = P one T_C less; for P = 2 always 2 T_C
"""

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.schedule.action import Action, Kind
from lightning_hanayo.schedule.registry import Request, register_schedule
from lightning_hanayo.schedule.schedule import Schedule


@register_schedule("chimera", num_replicas=2)
def chimera(request: Request) -> Schedule:
    """Two replicas of P stages each, for even P; any B."""
    request.stages_per_rank(2)
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
    """The rank's actions by slot, in each slot the forward first."""
    slots: dict[tuple[int, bool], Action] = {}
    for microbatch in range(num_microbatches):
        up, item = _direction(microbatch, num_ranks, num_microbatches)
        position = num_ranks - 1 - rank if up else rank
        stage = num_ranks * up + position
        slots[2 * item + position, False] = Action(stage, Kind.F, microbatch)
        slots[2 * item + 2 * num_ranks - 2 - position, True] = Action(stage, Kind.B, microbatch)
    return tuple(slots[slot] for slot in sorted(slots))


def _direction(microbatch: int, num_ranks: int, num_microbatches: int) -> tuple[bool, int]:
    """Whether a micro-batch goes up, and how many before it do the same: of each P, the first half goes down."""
    unit, item = divmod(microbatch, num_ranks)
    down = (min(num_ranks, num_microbatches - unit * num_ranks) + 1) // 2
    return item >= down, unit * (num_ranks // 2) + item % down

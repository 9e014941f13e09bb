"""Pattern: when one micro-batch runs each action, so that others can follow every period without a collision.

A rank's time is divided into cells of one length, the time of one stage's F, I or W. 3V cells (V stages per rank) make
a period, in which each micro-batch takes one cell for each of its actions on the rank:

    P = 2, W = 1      cell     0  1  2  3  4  5 | 6  7  8  9 10
    no pauses         rank 0   F0       F3 I3 W3 |    I0 W0             6 cells later, micro-batch 1 does the same
                      rank 1      F1 F2       I2 | I1       W2 W1       in the cells that are still free

Pauses leave time for messages, and cost memory: a micro-batch holds its activations for longer, so more of them are
under way at once. The steady state of the whole schedule is one such pattern, so its memory is known in advance.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pauses:
    """Cells left free: after messages down (to the next rank) and up, in the forward and in the backward; between
    forward and backward; before the weight gradients; and the cells of a period beyond 3V.
    """

    down: int = 0
    up: int = 0
    back_down: int = 0
    back_up: int = 0
    turn: int = 0
    weights: int = 0
    period: int = 0


class Pattern:
    """One micro-batch's cells: at each stage the first free one that keeps to `pauses`."""

    def __init__(self, stage_ranks: Sequence[int], pauses: Pauses) -> None:
        stages = range(len(stage_ranks))
        self._stage_ranks = stage_ranks
        self.period = 3 * stage_ranks.count(0) + pauses.period
        used = [[False] * self.period for _ in range(max(stage_ranks) + 1)]

        def place(stage: int, cell: int) -> int:
            row = used[stage_ranks[stage]]
            while row[cell % self.period]:
                cell += 1
            row[cell % self.period] = True
            return cell

        def walk(order: Sequence[int], cell: int, down: int, up: int) -> dict[int, int]:
            cells: dict[int, int] = {}
            for stage in order:
                here = stage_ranks[stage]
                before = stage_ranks[next(reversed(cells))] if cells else here
                cell = cells[stage] = place(stage, cell + (down if here > before else up if here < before else 0))
                cell += 1
            return cells

        forward = walk(stages, 0, pauses.down, pauses.up)
        turned = forward[stages[-1]] + 1 + pauses.turn
        backward = walk(stages[::-1], turned, pauses.back_down, pauses.back_up)
        weights = {stage: place(stage, backward[stage] + 1 + pauses.weights) for stage in stages[::-1]}
        self.forward, self.backward, self.weights = (
            [cells[stage] for stage in stages] for cells in (forward, backward, weights)
        )

    @property
    def cells(self) -> tuple[tuple[int, ...], ...]:
        """The cells of all F, all I and all W, and the period. Two patterns with the same cells are the same."""
        return tuple(map(tuple, (self.forward, self.backward, self.weights, [self.period])))

    @property
    def latency(self) -> int:
        """Cells from a micro-batch's first forward to its last input gradient."""
        return max(self.backward) + 1

    @property
    def peak(self) -> int:
        """The most activations on any rank in the steady state, counted in stages."""
        held = [[0] * self.period for _ in range(max(self._stage_ranks) + 1)]
        for rank, begin, end in zip(self._stage_ranks, self.forward, self.weights, strict=True):
            whole, rest = divmod(end + 1 - begin, self.period)
            for cell in range(self.period):
                held[rank][cell] += whole + ((cell - begin) % self.period < rest)
        return max(map(max, held))

    def keys(self, num_microbatches: int, weights: bool) -> list[float]:
        """By code: the cell of each F and I, and of each W if `weights`."""
        cells_of_kinds = [self.forward, self.backward, self.weights][: 3 if weights else 2]
        starts = [microbatch * self.period for microbatch in range(num_microbatches)]
        return [float(cell + start) for cells in cells_of_kinds for cell in cells for start in starts]

"""Weights that both actions of a pair need, gathered by one of them: two forwards, or two backwards, of one stage.

    first action     gather a | ... | gather b | ...
    second action      uses a          |   uses b           waits where the first one hasn't got so far

Both gather the same weights in the same order, so what the second one would gather for the n-th time is what the first
one gathers for the n-th time. Without it both would gather all of them.
"""

from collections import Counter
from collections.abc import Callable, Hashable
from functools import cache

from torch import Tensor

from lightning_hanayo.overlap.turns import DeviceTurns
from lightning_hanayo.tensor3d.mesh import Pending

Start = Callable[[], Pending[list[Tensor]]]


class PairWeights:
    """Of one stage.

    Args:
        turns: which of two actions runs now, and whether both do the same to the same stage.
    """

    def __init__(self, turns: DeviceTurns | None = None) -> None:
        self._turns = DeviceTurns() if turns is None else turns
        self._pair = 0
        """the number of the pair that what follows belongs to"""
        self._counts: Counter[tuple[int, Hashable]] = Counter()
        """by slot and weight: how often it was gathered, or taken from the other action"""
        self._gathered: dict[tuple[int, Hashable], Pending[list[Tensor]]] = {}
        """by count and weight: what the first action gathers, until the second one takes it"""

    def gather(self, weight: Hashable, start: Start) -> Pending[list[Tensor]]:
        """What `start` gathers, or what the pair's first action has gathered or will gather."""
        turns = self._turns
        if not turns.are_twins:
            return start()
        if self._pair != turns.number:
            self.discard()
            self._pair = turns.number
        count = self._counts[turns.slot, weight]
        self._counts[turns.slot, weight] += 1
        if turns.slot == 1:
            return Pending(None, cache(lambda: self._take((count, weight), start)))
        made = self._gathered[count, weight] = start()
        return made

    def discard(self) -> None:
        """Free what no action has taken."""
        self._counts.clear()
        self._gathered.clear()

    def _take(self, key: tuple[int, Hashable], start: Start) -> list[Tensor]:
        self._turns.wait_for_other(lambda: key in self._gathered)
        own = self._gathered.pop(key, None)
        return (start() if own is None else own).wait()

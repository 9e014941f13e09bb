"""The pairing pass: lets a rank run two neighbouring actions at once, where the step gets shorter by that.

rank 0   F0 F1 B0 F2 B1 F3 B2 B3   ->   F0 F1+B0 F2+B1 F3+B2 B3        F of one micro-batch, B of another

It begins with the order and the pairs that it is given, pairs neighbours, and then moves single actions by a few places
and pairs them anew, while the simulated step gets no longer and the rank holds no more activations than it may. On each
stage, micro-batches keep their order, so that sums of gradients are the same to the last bit. A pair that it makes is a
forward and a backward: two forwards, which a table may hold as well, would let user code see that it isn't alone.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from random import Random

from lightning_hanayo.schedule.communication import AnyTable
from lightning_hanayo.schedule.cost import CostModel
from lightning_hanayo.schedule.search.evaluator import CodeRows, Evaluator
from lightning_hanayo.schedule.table import Action, Kind

EFFORT = 100_000
"""how many actions are run in total, in all orders that are tried"""
_SHIFTS = (-4, -3, -2, -1, 1, 2, 3, 4)

_Score = tuple[float, float, float]


def pair_up(
    table: AnyTable, costs: CostModel, *, budget: float | None = None, steady: bool = False, effort: int = EFFORT
) -> AnyTable:
    """The same actions, some in pairs and maybe in another order; the simulated step is no longer than that of `table`.

    Args:
        table: a valid schedule.
        costs: of actions, with `segments`: without them no two actions are quicker at once.
        budget: the most activations that a rank may hold, in M_a (default: one more than it holds in `table`, as two
            micro-batches are under way).
        steady: whether to compare orders by the time that a following step adds.
        effort: how many actions are run at most, in all orders that are tried.
    """
    search = _Pairing(table, costs, budget, effort, steady=steady)
    search.pair_neighbours()
    search.improve()
    rows = search.evaluator.decode(search.rows)
    action = search.evaluator.action
    pairs = frozenset((action(first), action(second)) for first, second in search.pairs.items())
    return replace(table, actions=rows, pairs=pairs)


class _Pairing:
    def __init__(self, table: AnyTable, costs: CostModel, budget: float | None, effort: int, *, steady: bool) -> None:
        self.evaluator = Evaluator(replace(table, pairs=frozenset()), costs)
        self.rows: CodeRows = self.evaluator.encode(table.actions)
        code_of = dict(zip(chain(*table.actions), chain(*self.rows), strict=True))
        self.pairs = {code_of[first]: code_of[second] for first, second in table.pairs}
        self._steady = steady
        self._actions = {code: self.evaluator.action(code) for row in self.rows for code in row}
        self._shares = [table.share_of(stage) for stage in range(table.num_stages)]
        self._most = [self._held(row, self.pairs) + 1 if budget is None else budget for row in self.rows]
        self._score = self._score_of(self.rows, self.pairs)
        self._left = effort

    def pair_neighbours(self) -> None:
        """Pair neighbours where that makes the step no longer: all at once, else one by one."""
        candidates = [pair for row in self.rows for pair in zip(row, row[1:], strict=False) if self._fits(*pair)]
        taken = {*self.pairs, *self.pairs.values()}
        apart = []
        for pair in candidates:
            if taken.isdisjoint(pair):
                apart.append(pair)
                taken.update(pair)
        if self._try(*self._with_pairs(apart, self.rows, self.pairs)):
            return
        for pair in candidates:
            if self._left <= 0:
                return
            if not {*self.pairs, *self.pairs.values()} & set(pair):
                self._try(*self._with_pairs([pair], self.rows, self.pairs))

    def improve(self) -> None:
        """Move actions, and pair them with their new neighbours."""
        random = Random(0)
        while self._left > 0:
            self._left -= 1
            rank = random.randrange(len(self.rows))
            row = list(self.rows[rank])
            place = random.randrange(len(row))
            code, before = row.pop(place), place
            place = max(0, min(len(row), place + random.choice(_SHIFTS)))
            row.insert(place, code)
            passed = row[min(before, place) : max(before, place) + 1]
            own = self._actions[code]
            same = [self._actions[other] for other in passed if other != code]
            if any((one.stage, one.kind) == (own.stage, own.kind) for one in same):
                continue  # gradients are added in the order of micro-batches
            pairs = {first: second for first, second in self.pairs.items() if code not in (first, second)}
            if any(one in pairs and row[at + 1 : at + 2] != [pairs[one]] for at, one in enumerate(row)):
                continue  # another pair was torn apart
            rows = [row if other == rank else same for other, same in enumerate(self.rows)]
            taken = {*pairs, *pairs.values()}
            neighbours = [pair for pair in zip(row, row[1:], strict=False) if code in pair and taken.isdisjoint(pair)]
            fitting = [pair for pair in neighbours if self._fits(*pair)]
            chosen = [random.choice(fitting)] if fitting and random.random() < 0.8 else []
            self._try(*self._with_pairs(chosen, rows, pairs))

    def _with_pairs(
        self, added: Sequence[tuple[int, int]], rows: CodeRows, pairs: dict[int, int]
    ) -> tuple[list[list[int]], dict[int, int]]:
        """The rows and pairs with more pairs of neighbours, of each of which the forward comes first."""
        made, pairs = [list(row) for row in rows], dict(pairs)
        place = {code: (rank, at) for rank, row in enumerate(made) for at, code in enumerate(row)}
        for pair in added:
            forward, backward = sorted(pair, key=lambda code: self._actions[code].kind is not Kind.F)
            rank, at = place[pair[0]]
            made[rank][at : at + 2] = [forward, backward]
            pairs[forward] = backward
        return made, pairs

    def _fits(self, first: int, second: int) -> bool:
        one, other = self._actions[first], self._actions[second]
        one_forward = (one.kind is Kind.F) != (other.kind is Kind.F)
        return one_forward and one.microbatch != other.microbatch and Kind.W not in (one.kind, other.kind)

    def _try(self, rows: CodeRows, pairs: dict[int, int]) -> bool:
        """Keep an order if it is no worse."""
        self._left -= sum(map(len, rows)) * (2 if self._steady else 1)  # a following step is run, too
        if any(self._held(row, pairs) > most + 1e-9 for row, most in zip(rows, self._most, strict=True)):
            return False
        score = self._score_of(rows, pairs)
        if score > self._score:
            return False
        self.rows, self.pairs, self._score = rows, pairs, score
        return True

    def _score_of(self, rows: CodeRows, pairs: dict[int, int]) -> _Score:
        times = self.evaluator.run(rows, pairs=pairs)
        if times is None:
            return inf, inf, inf
        ends = round(sum(map(sum, times.ends)), 6)
        if not self._steady:
            return round(times.makespan, 9), -len(pairs), ends
        following = self.evaluator.run(rows, times.last, pairs)
        assert following is not None
        return round(following.makespan - times.makespan, 9), round(times.makespan, 9), ends

    def _held(self, row: Sequence[int], pairs: dict[int, int]) -> float:
        """The most activations at once, in M_a."""
        held = most = 0.0
        freed = 0.0
        for code in row:
            action: Action = self._actions[code]
            share = self._shares[action.stage]
            if action.kind is Kind.F:
                held += share
            elif action.kind in (Kind.B, Kind.W):
                freed += share
            if code not in pairs:  # both of a pair hold theirs until it ends
                most = max(most, held)
                held, freed = held - freed, 0.0
        return most

"""The search: the best order met so far, and how much may still be played for a better one.

plans ---> ListScheduler ---> order ---> makespan, and by how much a second step ends later ---> best so far
                           ^                                                                   |
                           +------------- some actions a little earlier or later -------------+
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from random import Random

from lightning_hanayo.schedule.search.evaluator import Evaluator
from lightning_hanayo.schedule.search.list_scheduler import FillPolicy, Job, ListScheduler

EFFORT = 600_000
"""Actions played in search of a better order. The first order is always played to its end, however large."""
PLAYS = 1000
"""The most orders played: in a small table, where `EFFORT` would allow many more, that is plenty."""


Score = tuple[float, float]


class Search:
    """The best order so far.

    Args:
        job: what is scheduled.
        compiled: its rules and costs.
        steady: better is what takes less as one of many steps that follow each other without a barrier, and among these
            what takes less by itself; else the other way round.
    """

    def __init__(self, job: Job, compiled: Evaluator, *, steady: bool = False) -> None:
        self.job, self.compiled, self.steady = job, compiled, steady
        self.best: list[list[int]] = []
        self.score: Score = (inf, inf)
        self._bounds = self._score(*map(_rounded, lower_bounds(job)))
        self._enough = self._bounds[0]
        if all(len(set(times)) == 1 for times in job.times) and job.capacity >= job.num_stages:
            self._enough += sum(job.hops)  # the closed form: hardly ever is anything faster
        self.effort = EFFORT
        self.left = min(self.effort, PLAYS * job.num_actions)  # actions that may still be played
        if steady:
            self.left //= 4  # the builder's own plans are hardly ever bettered

    @property
    def goes_on(self) -> bool:
        """Whether a better order can be hoped for, and may be looked for."""
        return self._goes_on(until=0)

    def _goes_on(self, until: float) -> bool:
        return not self.best or (self.left > until and self.score > self._bounds)

    def along(self, plans: Iterator[tuple[list[list[int]], FillPolicy]], until: float = 0) -> None:
        """Play plan after plan, as long as more than `until` of the effort is left."""
        while self._goes_on(until) and (one := next(plans, None)) is not None:
            self.play(*one)

    def take(self, rows: list[list[int]]) -> None:
        """Keep an order made elsewhere, as it is, if it fits and is the best so far."""
        kind = self.job.num_actions // 3
        for row in rows:
            held = accumulate((code < kind) - (code >= 2 * kind) for code in row)
            if max(held) > self.job.capacity:
                return
        self._keep(rows, self.compiled.makespan(rows))

    def _score(self, makespan: float, following: float) -> Score:
        return (following, makespan) if self.steady else (makespan, following)

    def _keep(self, rows: list[list[int]], makespan: float) -> Score:
        """The score of an order, which becomes the best if it is better."""
        makespan = _rounded(makespan)
        if not self.steady and (makespan > self.score[0] or (makespan == self.score[0] and self.left <= 0)):
            return makespan, inf
        score = self._score(makespan, self._following(rows) if self.steady or self.left > 0 else inf)
        if score < self.score:
            self.best, self.score = rows, score
        if self.score[0] <= self._enough:
            self.left = min(self.left, self.effort // 8, PLAYS // 25 * self.job.num_actions)  # little is left to gain
        return score

    def _following(self, rows: list[list[int]]) -> float:
        """By how much a second step ends later, each rank beginning it as soon as its own first one is over."""
        one = self.compiled.play(rows)
        assert one is not None
        two = self.compiled.play(rows, one.last)
        assert two is not None
        return _rounded(two.makespan - one.makespan)

    def play(self, plan: Sequence[Sequence[int]], manner: FillPolicy) -> tuple[Score, list[list[int]]]:
        """One play: the order, and how good it is. It is kept if it is the best so far."""
        follower = ListScheduler(self.job, plan, manner)
        makespan = follower.play()
        self.left -= self.job.num_actions * (3 if self.steady else 1)  # to see what follows takes two plays more
        return self._keep(follower.rows, makespan), follower.rows

    def improve(self) -> None:
        """Change the best order a little and play it again, as long as the effort lasts; what is no worse is kept."""
        if not self.goes_on or self.score[0] <= self._enough:
            return
        random = Random(0)
        manners = [
            FillPolicy(),
            FillPolicy(reach=1),
            FillPolicy(2, 0.5, True),
            FillPolicy(4),
            FillPolicy(reach=2, patience=0.5),
        ]
        rows, time = self.best, self.score[0]
        keys = self._starts(rows)
        while self.goes_on:
            changed = _changed(keys, self.job, random)
            (found, _), found_rows = self.play(self.job.rows(changed), random.choice(manners))
            if found <= time * (1 + 1e-9):
                rows, time = found_rows, found
                keys = self._starts(rows)

    def _starts(self, rows: list[list[int]]) -> list[float]:
        """When each F and I starts, by code."""
        played = self.compiled.play(rows)
        assert played is not None
        starts = [0.0] * self.job.num_actions
        for row, times in zip(rows, played.starts, strict=True):
            for code, start in zip(row, times, strict=True):
                starts[code] = start
        return starts[: len(starts) // 3 * 2]


def lower_bounds(job: Job) -> tuple[float, float]:
    """No step can take less, and no step that follows others: a rank's work behind what comes before it; its work."""
    lead = bound = 0.0
    work = [0.0] * job.num_ranks
    for stage, rank in enumerate(job.stage_ranks):
        work[rank] += job.num_microbatches * sum(times[stage] for times in job.times)
    for stage in range(job.num_ranks):
        bound = max(bound, lead + work[job.stage_ranks[stage]])
        lead += job.times[0][stage] + (job.hops[stage] if stage < len(job.hops) else 0.0)
    return bound, max(work)


def _rounded(time: float) -> float:
    """Without the noise of adding in another order."""
    return float(f"{time:.9g}")


def _changed(keys: list[float], job: Job, random: Random) -> list[float]:
    """Some actions that belong together, a little earlier or later: one, a stage's or a leg's or a micro-batch's."""
    keys = list(keys)
    num_ranks, num_stages, num_microbatches = job.num_ranks, job.num_stages, job.num_microbatches
    cell = sum(map(sum, job.times)) / (3 * num_stages)
    for _ in range(random.choice((1, 1, 2, 3))):
        shift = random.choice((-1, 1)) * random.choice((0.5, 1, 1.5, 2, 3, 4, 6, 8, 12)) * cell
        kind, stage = random.randrange(2), random.randrange(num_stages)
        first = random.randrange(num_microbatches)
        some = range(first, min(num_microbatches, first + 1 + int(random.expovariate(0.3))))
        leg = stage - stage % num_ranks
        stages, microbatches = random.choice(
            (
                ([stage], range(first, first + 1)),
                ([stage], some),
                (range(num_stages), range(first, first + 1)),
                (range(leg, leg + num_ranks), some),
                (range(num_stages), some),
            )
        )
        for one in stages:
            for microbatch in microbatches:
                keys[(kind * num_stages + one) * num_microbatches + microbatch] += shift
    return keys

"""A minimal reduction benchmark: all three ways compute the right sums, and all figures exist.

round     none   overlapped   end           exposed = (overlapped - none) / (end - none), of the same round
0          10      12      18           2 / 8
1          20      23      24           3 / 4
2          10      11      20           1 / 10          median: 2 / 8
"""

import pytest
import torch.distributed as dist

from recipes.benchmarks.case import Case, candidates
from recipes.benchmarks.harness import table
from recipes.benchmarks.reduction import COLUMNS, ReductionPlan, WayTimings, main, result_of, run_all
from recipes.benchmarks.rounds import RoundTiming
from tests.harness.pool import Pool

(CANDIDATE,) = candidates(["hanayo"], [2])
PLAN = ReductionPlan(Case(2, 4, 1.0, 1.0, 1.0, 64, steps=1), (CANDIDATE,), 2, (1.0,), 3)


def rounds(*ends: float) -> tuple[RoundTiming, ...]:
    return tuple(RoundTiming(0.0, (end,), cpu=0.0) for end in ends)


def test_rounds_are_compared_with_themselves() -> None:
    timings = WayTimings({"none": rounds(10, 20, 10), "overlapped": rounds(12, 23, 11), "end": rounds(18, 24, 20)}, 0.0)
    early = WayTimings({way: rounds(1, 1, 1) for way in timings.rounds}, 0.5)
    result = result_of(PLAN, CANDIDATE, 1.0, [timings, early])
    assert (result.step, result.at_the_end, result.overlapped) == (10, 8, 2)
    assert (result.exposed, result.least, result.most) == (0.25, 0.1, 0.75)
    assert result.max_error == 0.5


def test_the_ideal_is_the_last_stages_share() -> None:
    """Of a rank's four stages, the reductions of three overlap completely with compute."""
    timings = WayTimings({way: rounds(10) for way in ("none", "overlapped")} | {"end": rounds(12)}, 0.0)
    assert result_of(PLAN, CANDIDATE, 1.0, [timings]).ideal == pytest.approx(0.25)


def run(plan: ReductionPlan) -> list[WayTimings]:
    dist.init_process_group("gloo")
    return run_all(dist.get_rank(), plan)


def test_every_way_sums_exactly(pool: Pool) -> None:
    """Large and small gradients on two replicas of two ranks."""
    plan = ReductionPlan(Case(2, 2, 0.001, 0.001, 0.001, 64, steps=1), (CANDIDATE,), 2, (0.001, 3.0), 1)
    ranks = pool.run(4, run, plan)
    assert [timings.max_error for timings in ranks[0]] == [0, 0]
    results = [result_of(plan, CANDIDATE, size, timings) for size, *timings in zip(plan.megabytes, *ranks, strict=True)]
    assert all(result.step > 0.007 for result in results)
    assert table(COLUMNS, results).count("| hanayo W=2 |") == 2


def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", "1"]) == 2
    error = capsys.readouterr().err
    assert "both are at least 2" in error and error.count("\n") == 1

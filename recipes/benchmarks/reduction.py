"""Measures how much of the gradient reduction over data ranks a step still waits for.

python -m recipes.benchmarks.reduction --data 2 --ranks 2 4 --microbatches 4 8
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_hanayo.errors import HanayoError
from recipes.benchmarks.harness import LOOPBACK, Findings, describe, new_parser, numeric, run, run_ranks, whole
from recipes.benchmarks.names import OURS

if TYPE_CHECKING:
    from recipes.benchmarks.case import Candidate, Case
    from recipes.benchmarks.harness import ProcessOptions
    from recipes.benchmarks.reduction_rank import ReductionPlan, WayTimings

HEAD = ("schedule", "P", "B", "MB per rank", "step ms", "reduced at the end, + ms", "of the step", "overlapped, + ms",
        "exposed", "min-max", "ideal")  # fmt: skip


@dataclass(frozen=True)
class ReductionResult:
    """One schedule with one size. Times are in seconds, medians over the rounds."""

    label: str
    num_ranks: int
    """of a pipeline"""
    num_microbatches: int
    megabytes_per_rank: float
    step: float
    """the step without any reduction"""
    at_the_end: float
    """the time that reductions after the last action add"""
    overlapped: float
    """the time that reductions within the schedule add"""
    exposed: float
    """overlapped / at_the_end, within one round"""
    least: float
    most: float
    ideal: float
    """the exposed part in the simulator, if all of a rank's reductions take `at_the_end`"""
    max_error: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    return run(_measure, _parser().parse_args(arguments))


def table(results: Sequence[ReductionResult], machine: Sequence[str], title: str) -> str:
    """The results as Markdown."""
    from recipes.paper.table import markdown

    return "\n\n".join(["\n".join(f"- {line}" for line in machine), title, markdown(HEAD, map(_row, results))]) + "\n"


def _row(result: ReductionResult) -> tuple[str, ...]:
    from recipes.paper.table import percent

    return (
        result.label,
        str(result.num_ranks),
        str(result.num_microbatches),
        f"{result.megabytes_per_rank:g}",
        f"{1e3 * result.step:.1f}",
        f"{1e3 * result.at_the_end:.1f}",
        percent(result.at_the_end / result.step, 0),
        f"{1e3 * result.overlapped:.1f}",
        percent(result.exposed, 0),
        f"{percent(result.least, 0)} - {percent(result.most, 0)}",
        percent(result.ideal, 0),
    )


def _parser() -> argparse.ArgumentParser:
    parser = new_parser("reduction", __doc__)
    many: dict[str, Any] = {"nargs": "+", "metavar": "N"}
    parser.add_argument("--data", type=whole, default=2, metavar="N", help="D, replicas of the pipeline (default 2)")
    parser.add_argument("--ranks", type=whole, default=[2], help="P (default 2)", **many)
    parser.add_argument("--microbatches", type=whole, default=[4], help="B (default 4)", **many)
    parser.add_argument("--waves", type=whole, default=[2, 4], help="W (default 2 4)", **many)
    parser.add_argument("--schedules", nargs="+", default=["hanayo"], metavar="NAME",
                        help=f"of {', '.join(OURS)} (default hanayo)")  # fmt: skip
    parser.add_argument("--forward-ms", type=numeric, default=40.0, metavar="MS",
                        help="one micro-batch's forward through a rank's whole share; the input and the weight "
                        "gradient take as long each (default 40)")  # fmt: skip
    parser.add_argument("--megabytes", type=numeric, nargs="+", default=[128.0], metavar="MB",
                        help="size of a rank's gradients (default 128)")  # fmt: skip
    parser.add_argument("--rounds", type=whole, default=9, metavar="N", help="all three ways in each (default 9)")
    parser.add_argument("--ordinary", action="store_true", help="don't ask for real-time priority")
    return parser


def _measure(options: argparse.Namespace) -> Findings:
    from recipes.benchmarks.case import Case, candidates
    from recipes.benchmarks.harness import ProcessOptions
    from recipes.benchmarks.reduction_rank import ReductionPlan

    chosen = tuple(candidates(_ours(options.schedules), options.waves))
    time = options.forward_ms / 1e3
    if min(options.ranks) < 2 or options.data < 2:
        raise HanayoError(f"--ranks {min(options.ranks)} --data {options.data}: both are at least 2")
    results: list[ReductionResult] = []
    for num_ranks, count in product(options.ranks, options.microbatches):
        case = Case(num_ranks, count, time, time, time, 4096, 1, planned_message=0.0005)
        plan = ReductionPlan(case, chosen, options.data, tuple(options.megabytes), options.rounds)
        priority, found = _results(plan, ProcessOptions(not options.ordinary))
        results += found
    title = f"D={options.data}, F/I/W {options.forward_ms:g} ms each, {options.rounds} rounds"
    machine = describe(LOOPBACK, priority)
    data = {"machine": machine, "case": title, "results": [asdict(result) for result in results]}
    return Findings(table(results, machine, title), data)


def _results(plan: "ReductionPlan", options: "ProcessOptions") -> "tuple[str, list[ReductionResult]]":
    """Run a plan in processes of its own. Returns the priority that they got, and the results."""
    from recipes.benchmarks.reduction_rank import run_all

    count, num_runs = plan.case.num_ranks * plan.num_replicas, len(plan.pairs) * (plan.num_rounds + 3) * 3
    found = run_ranks(run_all, plan, [options] * count, 120 + 40 * num_runs * plan.case.busy)
    ranks = [timings for _, timings in found]
    return found[0][0], [
        result_of(plan, candidate, megabytes, timings)
        for (candidate, megabytes), *timings in zip(plan.pairs, *ranks, strict=True)
    ]


def _ours(names: Sequence[str]) -> Sequence[str]:
    if strange := [name for name in names if name not in OURS]:
        raise HanayoError(f"--schedules {strange[0]}: expected some of {', '.join(OURS)}")
    return names


def result_of(
    plan: "ReductionPlan", candidate: "Candidate", megabytes: float, ranks: Sequence["WayTimings"]
) -> ReductionResult:
    """Combine the ranks' records: in each round, the time that either way adds to the step without reductions."""
    from recipes.benchmarks.result import step_time

    def steps(way: Any) -> list[float]:
        return [step_time(turn) for turn in zip(*(timings.rounds[way] for timings in ranks), strict=True)]

    plain, overlapped, end = steps("none"), steps("overlapped"), steps("end")
    late = [b - a for a, b in zip(plain, end, strict=True)]
    hidden = [b - a for a, b in zip(plain, overlapped, strict=True)]
    ratios = [some / all_of_it for some, all_of_it in zip(hidden, late, strict=True)]
    return ReductionResult(
        label=candidate.label,
        num_ranks=plan.case.num_ranks,
        num_microbatches=plan.case.num_microbatches,
        megabytes_per_rank=megabytes,
        step=median(plain),
        at_the_end=median(late),
        overlapped=median(hidden),
        exposed=median(ratios),
        least=min(ratios),
        most=max(ratios),
        ideal=ideal(plan.case, candidate, median(late)),
        max_error=max(timings.max_error for timings in ranks),
    )


def ideal(case: "Case", candidate: "Candidate", seconds: float) -> float:
    """The exposed part in the simulator, if a rank's reductions together take `seconds`."""
    from lightning_hanayo.schedule import simulate

    schedule = case.schedule(candidate)
    plain, reducing = (
        simulate(schedule, replace(case.costs, gradient_reduce=time)).makespan for time in (0.0, max(seconds, 1e-9))
    )
    return (reducing - plain) / max(seconds, 1e-9)


if __name__ == "__main__":
    sys.exit(main())

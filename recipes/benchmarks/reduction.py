"""Measures how much of the gradient reduction over data ranks a step still waits for.

python -m recipes.benchmarks.reduction --data 2 --ranks 2 4 --microbatches 4 8

none          F F B B                    the step without reductions
overlapped    F F B |reduce| B |         where the schedule has them, while other stages compute
end           F F B B |reduce reduce|    the same reductions, all after the last action
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.pipeline_parallel.grad_sync import GradientAllReduce
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport
from lightning_hanayo.schedule import simulate
from lightning_hanayo.topology import Topology
from recipes.benchmarks.case import OURS, Candidate, Case, candidates
from recipes.benchmarks.harness import (
    LOOPBACK,
    Columns,
    Findings,
    ProcessOptions,
    describe,
    in_turn,
    ms,
    new_parser,
    number,
    page,
    run,
    run_ranks,
    table,
)
from recipes.benchmarks.rounds import WARM_UP, RoundTiming, step_time, time_steps
from recipes.benchmarks.runners import EmulatedStack, OurRunner, transport_of
from recipes.paper.page import percent

Way = Literal["none", "overlapped", "end"]
WAYS: tuple[Way, ...] = get_args(Way)
MATRICES, VECTORS, FEATURES = 4, 8, 1024
"""a stage's gradients: a few large and some small ones, as in a transformer block"""


@dataclass(frozen=True)
class ReductionPlan:
    """What all ranks run."""

    case: Case
    candidates: tuple[Candidate, ...]
    num_replicas: int
    megabytes: tuple[float, ...]
    """sizes of a rank's gradients; one case each"""
    num_rounds: int

    @property
    def pairs(self) -> list[tuple[Candidate, float]]:
        """Each candidate with each size."""
        return list(product(self.candidates, self.megabytes))


@dataclass(frozen=True)
class WayTimings:
    """One rank's times for one candidate and size."""

    rounds: dict[Way, tuple[RoundTiming, ...]]
    """for each way, by round"""
    max_error: float
    """relative error of the sums"""


def run_all(rank: int, plan: ReductionPlan) -> list[WayTimings]:
    """Run this rank: each candidate with each size, all ways in each round."""
    topology = Topology(data=plan.num_replicas, pipe=plan.case.num_ranks)
    pipe, data = (
        dist.new_subgroups_by_enumeration([list(ranks) for ranks in topology.groups(axis)])[0]
        for axis in ("pipe", "data")
    )
    transport = transport_of(topology.group_of(rank, "pipe"), pipe)
    return [
        _measure_ways(ReducingRunner(plan.case, candidate, transport, data, megabytes), plan.num_rounds)
        for candidate, megabytes in plan.pairs
    ]


class ReducingRunner(OurRunner):
    """Our runtime; this rank's stages together have `megabytes` of gradients, allocated before the step."""

    def __init__(
        self,
        case: Case,
        candidate: Candidate,
        transport: ProcessGroupTransport,
        data: dist.ProcessGroup,
        megabytes: float,
    ) -> None:
        schedule = case.schedule(candidate)
        super().__init__(schedule, EmulatedStack(case, schedule.num_stages), transport, self._reach)
        self.way: Way = "none"
        self.share = 1.0 + data.rank()
        self._whole = data.size() * (data.size() + 1) / 2
        self._reduced = {number: _dummy_parameters(megabytes / len(self.stages)) for number in self.stages}
        self._reduction = GradientAllReduce(self._reduced, data)

    def fill(self, value: float) -> None:
        """Set all gradients."""
        for gradient in self._gradients():
            gradient.fill_(value)

    @property
    def error(self) -> float:
        """The relative error of the sums after a step that began with gradients of `share`."""
        expected = self.share if self.way == "none" else self._whole
        return max(float((gradient / expected - 1).abs().max()) for gradient in self._gradients())

    @override
    def run_step(self) -> None:
        super().run_step()
        if self.way == "end":
            for stage in reversed(self.stages):
                self._reduction.start(stage)
        self._reduction.finish()

    def _reach(self, stage: int) -> None:
        if self.way == "overlapped":
            self._reduction.start(stage)

    def _gradients(self) -> Iterator[Tensor]:
        for parameters in self._reduced.values():
            for parameter in parameters:
                assert parameter.grad is not None
                yield parameter.grad


def _dummy_parameters(megabytes: float) -> list[nn.Parameter]:
    features = max(1, min(FEATURES, int(megabytes * 2**20 / 4) // (MATRICES + VECTORS)))
    rows = max(1, round((megabytes * 2**20 / 4 - VECTORS * features) / (MATRICES * features)))
    shapes = [(rows, features)] * MATRICES + [(features,)] * VECTORS
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters


def _measure_ways(runner: ReducingRunner, num_rounds: int) -> WayTimings:
    errors = []
    rounds: dict[Way, list[RoundTiming]] = {way: [] for way in WAYS}
    for way in WAYS * WARM_UP:
        runner.way = way
        runner.fill(runner.share)
        runner.run_step()
        errors.append(runner.error)
    runner.fill(0.0)  # zero stays zero however often it is summed, so nothing needs to be written between rounds
    for _, way in in_turn(WAYS, num_rounds):
        runner.way = way
        rounds[way].append(time_steps(runner, steps=1))
    return WayTimings({way: tuple(found) for way, found in rounds.items()}, max(errors))


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


COLUMNS: Columns = (
    ("schedule", lambda one: one.label),
    ("P", lambda one: str(one.num_ranks)),
    ("B", lambda one: str(one.num_microbatches)),
    ("MB per rank", lambda one: f"{one.megabytes_per_rank:g}"),
    ("step ms", lambda one: ms(one.step)),
    ("reduced at the end, + ms", lambda one: ms(one.at_the_end)),
    ("of the step", lambda one: percent(one.at_the_end / one.step, 0)),
    ("overlapped, + ms", lambda one: ms(one.overlapped)),
    ("exposed", lambda one: percent(one.exposed, 0)),
    ("min-max", lambda one: f"{percent(one.least, 0)} - {percent(one.most, 0)}"),
    ("ideal", lambda one: percent(one.ideal, 0)),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and write the requested files. Returns the exit code."""
    parser = new_parser("reduction", __doc__)
    number(parser, "--data", 2, "D, replicas of the pipeline")
    number(parser, "--ranks", [2], "P")
    number(parser, "--microbatches", [4], "B")
    number(parser, "--waves", [2, 4], "W")
    parser.add_argument("--schedules", nargs="+", choices=OURS, default=["hanayo"], metavar="NAME",
                        help=f"of {', '.join(OURS)} (default hanayo)")  # fmt: skip
    number(parser, "--forward-ms", 40.0, "one micro-batch's forward through a rank's whole share; the input and the "
           "weight gradient take as long each", "MS")  # fmt: skip
    number(parser, "--megabytes", [128.0], "size of a rank's gradients", "MB")
    number(parser, "--rounds", 9, "all three ways in each")
    parser.add_argument("--ordinary", action="store_true", help="don't ask for real-time priority")
    return run(_measure, parser.parse_args(arguments))


def _measure(options: argparse.Namespace) -> Findings:
    chosen = tuple(candidates(options.schedules, options.waves))
    time = options.forward_ms / 1e3
    if min(options.ranks) < 2 or options.data < 2:
        raise HanayoError(f"--ranks {min(options.ranks)} --data {options.data}: both are at least 2")
    results: list[ReductionResult] = []
    for num_ranks, microbatches in product(options.ranks, options.microbatches):
        case = Case(num_ranks, microbatches, time, time, time, 4096, 1, planned_message=0.0005)
        plan = ReductionPlan(case, chosen, options.data, tuple(options.megabytes), options.rounds)
        count, num_runs = num_ranks * options.data, len(plan.pairs) * (plan.num_rounds + 3) * 3
        processes = [ProcessOptions(not options.ordinary)] * count
        found = run_ranks(run_all, plan, processes, 120 + 40 * num_runs * case.busy)
        results += [
            result_of(plan, candidate, megabytes, timings)
            for (candidate, megabytes), *timings in zip(plan.pairs, *(timings for _, timings in found), strict=True)
        ]
    title = f"D={options.data}, F/I/W {options.forward_ms:g} ms each, {options.rounds} rounds"
    machine = describe(LOOPBACK, found[0][0])
    data = {"machine": machine, "case": title, "results": results}
    return Findings(page(machine, title, table(COLUMNS, results)), data)


def result_of(
    plan: ReductionPlan, candidate: Candidate, megabytes: float, ranks: Sequence[WayTimings]
) -> ReductionResult:
    """Combine the ranks' records: in each round, the time that either way adds to the step without reductions."""

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


def ideal(case: Case, candidate: Candidate, seconds: float) -> float:
    """The exposed part in the simulator, if a rank's reductions together take `seconds`."""
    schedule = case.schedule(candidate)
    plain, reducing = (
        simulate(schedule, replace(case.costs, gradient_reduce=time)).makespan for time in (0.0, max(seconds, 1e-9))
    )
    return (reducing - plain) / max(seconds, 1e-9)


if __name__ == "__main__":
    sys.exit(main())

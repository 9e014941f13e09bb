"""Runs one rank of the pipeline benchmark: all candidates once per round, each round starting with another one."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from lightning_hanayo.schedule import simulate
from recipes.benchmarks.autograd_only import AutogradRunner
from recipes.benchmarks.bare import BareRunner
from recipes.benchmarks.case import Candidate, Case
from recipes.benchmarks.harness import oversleep
from recipes.benchmarks.hop import measure_hop
from recipes.benchmarks.ours import OurRunner
from recipes.benchmarks.peer import TorchRunner
from recipes.benchmarks.runner import Runner

WARM_UP = 3
HEAD_START = 0.002
"""seconds between agreeing on a start time and that time"""


_RUNNERS: dict[str, Callable[[Case, Candidate], Runner]] = {
    "ours": OurRunner,
    "torch": TorchRunner,
    "autograd": AutogradRunner,
    "bare": BareRunner,
}


@dataclass(frozen=True)
class RoundTiming:
    """The times of one candidate in one round on one rank, in seconds of the machine's monotonic clock."""

    start: float
    ends: tuple[float, ...]
    """of each step"""
    cpu: float
    """CPU seconds of all the process's threads, in all steps"""


@dataclass(frozen=True)
class Record:
    """One rank's record of a candidate."""

    rounds: tuple[RoundTiming, ...]
    gradients: dict[int, float]
    losses: tuple[float, ...]
    ideal: tuple[float, ...]
    """seconds that each step adds if messages and the runtime take no time"""
    peaks: tuple[float, ...]
    """activations per rank, in M_a"""
    num_actions: tuple[int, ...]
    """per rank, in a step"""
    num_stages: int


@dataclass(frozen=True)
class Records:
    """One rank's records of a case."""

    records: dict[Candidate, Record]
    refused: dict[Candidate, str]
    """candidates that a runtime can't run, and why"""
    oversleep: float
    """how late a stage's sleep ends, in seconds"""
    hop: float | None
    """the measured message time in seconds, if orders were chosen for it"""
    per_action: float = 0.0
    """the measured time of the runtime per action in seconds, if a number of waves was chosen with it"""


@dataclass(frozen=True)
class Plan:
    """The cases, their candidates, and how many rounds."""

    cases: tuple[Case, ...]
    candidates: tuple[Candidate, ...]
    num_rounds: int


def run_all(rank: int, plan: Plan) -> list[Records]:
    """Run this rank: one case after the other."""
    return [_run_case(case, plan) for case in plan.cases]


def _run_case(case: Case, plan: Plan) -> Records:
    hop = None if case.planned_message is not None else measure_hop(case.width, case.forward / 4)
    if hop is not None:
        case = replace(case, planned_message=hop)
    if case.forward and any(candidate.is_planned for candidate in plan.candidates):
        case = replace(case, per_action=measure_action(case))
    runners, refused = _runners(case, plan.candidates)
    for runner in runners.values():
        for _ in range(WARM_UP):
            runner.zero_grad()
            runner.run_step()
    rounds: dict[Candidate, list[RoundTiming]] = {candidate: [] for candidate in runners}
    order = list(runners)
    for turn in range(plan.num_rounds):
        first = turn % len(order) if order else 0
        for candidate in order[first:] + order[:first]:
            rounds[candidate].append(time_steps(runners[candidate], case.steps))
    records = {candidate: _record(runner, rounds[candidate], case) for candidate, runner in runners.items()}
    late = oversleep(case.forward) if case.forward else 0.0
    return Records(records, refused, late, hop, case.per_action)


def _runners(case: Case, candidates: tuple[Candidate, ...]) -> tuple[dict[Candidate, Runner], dict[Candidate, str]]:
    runners: dict[Candidate, Runner] = {}
    refused: dict[Candidate, str] = {}
    for candidate in candidates:
        runner_class = _RUNNERS[candidate.runtime]
        try:
            runners[candidate] = runner_class(case, candidate)
        except (ValueError, AssertionError) as error:  # all ranks get the same error
            refused[candidate] = " ".join(str(error).split())
    return runners, refused


def measure_action(case: Case) -> float:
    """Seconds by which each action takes longer in our runtime than in simulation. All ranks call it, and get the same.

    Those of a step with one wave, the median of three.
    """
    runner = OurRunner(case, Candidate("hanayo-zb", 1))
    for _ in range(WARM_UP):
        runner.zero_grad()
        runner.run_step()
    timings = [time_steps(runner, 1) for _ in range(3)]
    seconds = torch.tensor([timing.ends[-1] - timing.start for timing in timings], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    simulated = simulate(runner.schedule, replace(case.costs, message=case.planned_message or 0.0)).makespan
    dist.barrier()  # no rank drops its messages while others still need them
    return max(0.0, (float(seconds.median()) - simulated) / max(map(len, runner.schedule.actions)))


def time_steps(runner: Runner, steps: int) -> RoundTiming:
    """Run steps in a row, which all ranks begin at the same moment."""
    begin = _agreed_start()
    while (left := begin - time.monotonic()) > 0:
        time.sleep(left)
    cpu, start = time.process_time(), time.monotonic()
    ends = []
    for _ in range(steps):
        runner.zero_grad()
        runner.run_step()
        ends.append(time.monotonic())
    return RoundTiming(start, tuple(ends), time.process_time() - cpu)


def _agreed_start() -> float:
    """Agree on a start time soon after the last rank has arrived; all ranks share the machine's clock."""
    start = torch.tensor([time.monotonic() + HEAD_START], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    return start.item()


def _record(runner: Runner, rounds: list[RoundTiming], case: Case) -> Record:
    timeline = simulate(runner.schedule, case.costs, steps=case.steps)
    return Record(
        tuple(rounds),
        runner.gradients,
        tuple(runner.losses),
        timeline.step_times,
        timeline.steps[0].peak_activations if case.forward else simulate(runner.schedule).peak_activations,
        tuple(map(len, runner.schedule.actions)),
        runner.schedule.num_stages,
    )

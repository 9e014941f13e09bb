"""Runs one rank of the pipeline benchmark: all candidates once per round, each round starting with another one."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import monotonic
from typing import TypeVar

import torch
import torch.distributed as dist

from lightning_hanayo.pipeline_parallel.p2p import Message, MessageKey, PointToPointChannel
from lightning_hanayo.schedule import simulate
from recipes.benchmarks.case import Candidate, Case
from recipes.benchmarks.emulated import gradient_of
from recipes.benchmarks.harness import in_turn, oversleep, sleep_until
from recipes.benchmarks.runners import Runner, runner_of, transport_of

K = TypeVar("K")
HOP_WARM_UP, TURNS = 4, 24
"""turns that connect ranks and agree on shapes, and turns that count"""


def measure_hop(width: int, pause: float) -> float:
    """Return the median time of a message of `width` floats, in seconds. All ranks call it and get the same number."""
    transport = transport_of(range(dist.get_world_size()))
    channel, rank, size = PointToPointChannel(transport), transport.rank, transport.num_ranks
    message = Message(("output",), (torch.zeros(1, width),))
    starts, ends = (torch.full((HOP_WARM_UP + TURNS,), torch.nan, dtype=torch.float64) for _ in range(2))
    for turn in range(HOP_WARM_UP + TURNS):
        channel.begin_batch(0)
        sends, receives = (one % 2 == turn % 2 and 0 <= one < size - 1 for one in (rank, rank - 1))
        arriving, leaving = (MessageKey(one, "forward", 0) for one in (rank - 1, rank))
        if receives:
            channel.start_transfers([], [(arriving, rank - 1)])
        dist.barrier()
        sleep_until(monotonic() + pause)
        if sends:
            starts[turn] = monotonic()
            channel.start_transfers([(leaving, rank + 1, message)], [])
        if receives:
            channel.wait_receive(arriving)
            ends[turn] = monotonic()
    channel.finish()
    every_start, every_end = ([torch.empty_like(own) for _ in range(size)] for own in (starts, ends))
    dist.all_gather(every_start, starts)
    dist.all_gather(every_end, ends)
    hops = (torch.stack(every_end[1:]) - torch.stack(every_start[:-1]))[:, HOP_WARM_UP:]
    taken: list[float] = hops[~hops.isnan()].tolist()
    return median(taken)


WARM_UP = 3


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
    rounds = in_rounds(runners, plan.num_rounds, case.steps)
    records = {candidate: _record(runner, rounds[candidate], case) for candidate, runner in runners.items()}
    late = oversleep(case.forward) if case.forward else 0.0
    return Records(records, refused, late, hop, case.per_action)


def in_rounds(runners: Mapping[K, Runner], rounds: int, steps: int = 1) -> dict[K, list[RoundTiming]]:
    """Time the steps of all runners in turn, after some that connect ranks."""
    for runner in runners.values():
        for _ in range(WARM_UP):
            runner.zero_grad()
            runner.run_step()
    timings: dict[K, list[RoundTiming]] = {name: [] for name in runners}
    for _, name in in_turn(list(runners), rounds):
        timings[name].append(time_steps(runners[name], steps))
    return timings


def _runners(case: Case, candidates: tuple[Candidate, ...]) -> tuple[dict[Candidate, Runner], dict[Candidate, str]]:
    runners: dict[Candidate, Runner] = {}
    refused: dict[Candidate, str] = {}
    for candidate in candidates:
        try:
            runners[candidate] = runner_of(case, candidate)
        except (ValueError, AssertionError) as error:  # all ranks get the same error
            refused[candidate] = " ".join(str(error).split())
    return runners, refused


def measure_action(case: Case) -> float:
    """Seconds by which each action takes longer in our runtime than in simulation. All ranks call it, and get the same.

    Those of a step with one wave, the median of three.
    """
    runner = runner_of(case, Candidate("hanayo-zb", 1))
    timings = in_rounds({"": runner}, 3)[""]
    seconds = torch.tensor([timing.ends[-1] - timing.start for timing in timings], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    simulated = simulate(runner.schedule, replace(case.costs, message=case.planned_message or 0.0)).makespan
    dist.barrier()  # no rank drops its messages while others still need them
    return max(0.0, (float(seconds.median()) - simulated) / max(map(len, runner.schedule.actions)))


def time_steps(runner: Runner, steps: int) -> RoundTiming:
    """Run steps in a row, which all ranks begin at the same moment."""
    agreed_start()
    cpu, start = time.process_time(), time.monotonic()
    ends = []
    for _ in range(steps):
        runner.zero_grad()
        runner.run_step()
        ends.append(time.monotonic())
    return RoundTiming(start, tuple(ends), time.process_time() - cpu)


def step_time(turn: Sequence[RoundTiming]) -> float:
    """From the first start to the last end; of several steps the mean time that each after the first adds."""
    ends = [max(timing.ends[step] for timing in turn) for step in range(len(turn[0].ends))]
    if len(ends) == 1:
        return ends[0] - min(timing.start for timing in turn)
    return (ends[-1] - ends[0]) / (len(ends) - 1)


def agreed_start(head_start: float = 0.002) -> float:
    """Wait for a moment at which all ranks start, soon after the last one has arrived, and return it.

    They share the machine's clock.
    """
    start = torch.tensor([time.monotonic() + head_start], dtype=torch.float64)
    dist.all_reduce(start, dist.ReduceOp.MAX)
    sleep_until(start.item())
    return start.item()


def message_time(message: torch.Tensor, repeats: int) -> float:
    """Seconds of a message between the first two ranks: half of the way there and back. All ranks call it."""
    buffer, taken = torch.empty_like(message), []
    for _ in range(repeats + 1):
        start = agreed_start()
        for sender, receiver in ((0, 1), (1, 0)):
            if dist.get_rank() == sender:
                dist.send(message, receiver)
            elif dist.get_rank() == receiver:
                dist.recv(buffer, sender)
        taken.append((time.monotonic() - start) / 2)
    return median(taken[1:])


def _record(runner: Runner, rounds: list[RoundTiming], case: Case) -> Record:
    timeline = simulate(runner.schedule, case.costs, steps=case.steps)
    return Record(
        tuple(rounds),
        {number: gradient_of(stage) for number, blocks in runner.stages.items() for stage in blocks},
        tuple(runner.losses),
        timeline.step_times,
        timeline.steps[0].peak_activations if case.forward else simulate(runner.schedule).peak_activations,
        tuple(map(len, runner.schedule.actions)),
        runner.schedule.num_stages,
    )

"""Runs one rank of the reduction benchmark: one schedule, with its gradients reduced in three ways in turn.

none          F F B B                    the step without reductions
overlapped    F F B |reduce| B |         where the schedule has them, while other stages compute
end           F F B B |reduce reduce|    the same reductions, all after the last action
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, NoReturn, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.pipeline_parallel.grad_sync import GradientAllReduce
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport
from lightning_hanayo.topology import Topology
from recipes.benchmarks.case import Candidate, Case
from recipes.benchmarks.ours import OurRunner
from recipes.benchmarks.rounds import WARM_UP, RoundTiming, time_steps

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
    pipe, data = _group(topology, "pipe"), _group(topology, "data")
    transport = ProcessGroupTransport(
        topology.group_of(rank, "pipe"), control=pipe, channels={}, device=torch.device("cpu"), on_failure=_fail
    )
    found = []
    for candidate, megabytes in plan.pairs:
        found.append(_measure_ways(ReducingRunner(plan.case, candidate, transport, data, megabytes), plan))
    return found


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
        super().__init__(case, candidate, transport, self._reach)
        self.way: Way = "none"
        self.share = 1.0 + data.rank()
        self._whole = data.size() * (data.size() + 1) / 2
        self._parameters = {number: _dummy_parameters(megabytes / len(self.stages)) for number in self.stages}
        self._reduction = GradientAllReduce(self._parameters, data)

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
        for parameters in self._parameters.values():
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


def _measure_ways(runner: ReducingRunner, plan: ReductionPlan) -> WayTimings:
    errors = [_checked(runner, way) for way in WAYS * WARM_UP]
    runner.fill(0.0)  # zero stays zero however often it is summed, so nothing needs to be written between rounds
    rounds: dict[Way, list[RoundTiming]] = {way: [] for way in WAYS}
    for turn in range(plan.num_rounds):
        first = turn % len(WAYS)
        for way in WAYS[first:] + WAYS[:first]:
            runner.way = way
            rounds[way].append(time_steps(runner, steps=1))
    return WayTimings({way: tuple(rounds) for way, rounds in rounds.items()}, max(errors))


def _checked(runner: ReducingRunner, way: Way) -> float:
    runner.way = way
    runner.fill(runner.share)
    runner.run_step()
    return runner.error


def _group(topology: Topology, axis: str) -> Any:
    group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in topology.groups(axis)])
    return group


def _fail(error: Exception) -> NoReturn:
    raise error

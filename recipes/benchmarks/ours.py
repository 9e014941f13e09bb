"""Runs emulated stages in our runtime: engine, point-to-point channel and gloo, connected as in the strategy."""

from collections.abc import Callable
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.p2p import PointToPointChannel
from lightning_hanayo.pipeline_parallel.profiling.trace import Trace
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import MiddleStage, Stage
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport, Transport
from lightning_hanayo.schedule import Schedule
from recipes.benchmarks.case import Candidate, Case
from recipes.benchmarks.emulated import EmulatedLoss, EmulatedStage, inputs
from recipes.benchmarks.runner import Runner
from recipes.benchmarks.self_contained import SelfContainedFirstStage, SelfContainedLastStage


def world_transport() -> ProcessGroupTransport:
    """A transport over all ranks of the world, as one pipeline."""
    world = dist.group.WORLD
    assert world is not None
    cpu = torch.device("cpu")
    return ProcessGroupTransport(range(dist.get_world_size()), control=world, channels={}, device=cpu, on_failure=_fail)


def build_stage(
    blocks: list[nn.Module], number: int, schedule: Schedule, queue: WeightGradientQueue, *, num_blocks: int
) -> Stage:
    """Build stage `number` of a stack of `num_blocks` blocks that computes its own loss."""
    if number == 0:
        return SelfContainedFirstStage(blocks=blocks, queue=queue, num_blocks=num_blocks)
    is_last = number == schedule.num_stages - 1
    return (SelfContainedLastStage if is_last else MiddleStage)(blocks=blocks, queue=queue)


class OurRunner(Runner):
    """Our engine and its stages.

    Args:
        case: sizes and times.
        candidate: the schedule.
        transport: the transport between the pipeline's ranks; None: all ranks of the world are one pipeline.
        reduce: called with a stage's number when its gradients are complete.
    """

    def __init__(
        self,
        case: Case,
        candidate: Candidate,
        transport: Transport | None = None,
        reduce: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.schedule = case.schedule(candidate)
        transport = transport or world_transport()
        rank = transport.rank
        times = case.times(self.schedule.num_stages)
        self.stages = {number: EmulatedStage(number, times) for number in self.schedule.stages_of(rank)}
        runs = {number: self._run(number, stage, case) for number, stage in self.stages.items()}
        self._batch = Batch(
            inputs=inputs(case.num_microbatches, case.width).split(1),
            loss_weights=[1 / case.num_microbatches] * case.num_microbatches,
        )
        self._program = Program.from_schedule(self.schedule, rank)
        self._engine = Engine(runs, PointToPointChannel(transport), reduce, Trace())

    def _run(self, number: int, stage: EmulatedStage, case: Case) -> Stage:
        queue = stage.queue = WeightGradientQueue()
        is_last = number == self.schedule.num_stages - 1
        block = EmulatedLoss(stage) if is_last else stage
        return build_stage([block], number, self.schedule, queue, num_blocks=self.schedule.num_stages)

    @override
    def run_step(self) -> None:
        self._engine.run(self._program, self._batch)

    @property
    @override
    def losses(self) -> list[float]:
        return [loss.item() for _, loss in sorted(self._batch.results.items())]


def _fail(error: Exception) -> NoReturn:
    raise error

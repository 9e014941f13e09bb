"""A whole pipeline in one process: each rank is a thread, and all share one model."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn

from lightning_hanayo.partition.cut import Load, cut
from lightning_hanayo.pipeline_parallel import split_backward
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.capture import forward_patch
from lightning_hanayo.pipeline_parallel.capture.user_step import UserStep
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.grad_sync import TiedGradients
from lightning_hanayo.pipeline_parallel.p2p import PointToPointChannel
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import FirstStage, LastStage, MiddleStage, Stage
from lightning_hanayo.pipeline_parallel.trace import Trace
from lightning_hanayo.schedule import Schedule, forward_only, with_loss_stage
from tests.harness.limits import real_seconds
from tests.harness.loopback import Hub


def run_in_threads(functions: Sequence[Callable[[], None]]) -> None:
    """Run each function in a thread of its own, and raise the first error; a timeout only if there is no other."""
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in sorted(errors, key=lambda e: isinstance(e, TimeoutError)):
        raise error


class LoopbackPipeline:
    """Runs `schedule` over the blocks of a model that all ranks share."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        schedule: Schedule,
        hub: Hub | None = None,
        *,
        headers_ahead: bool | None = None,
    ) -> None:
        self.schedule = with_loss_stage(schedule)
        self.blocks = list(blocks)
        num_stages = self.schedule.num_stages - self.schedule.loss_stage
        self.runs = [
            *cut([Load([1.0] * len(self.blocks))], self.schedule.stage_ranks[:num_stages]),
            *([range(0)] if self.schedule.loss_stage else []),
        ]
        self.queues = [WeightGradientQueue() for _ in self.runs]
        for run, queue in zip(self.runs, self.queues, strict=True):
            split_backward.patch_linear_layers([self.blocks[i] for i in run], queue)
        forward_patch.patch_blocks(self.blocks)
        self.reduced: list[int] = []
        self.user = UserStep(self.blocks, len(self.runs[0]), "blocks")
        stages = self._stages()
        hub = hub or Hub(self.schedule.num_ranks, timeout=real_seconds(30))
        self.transports = hub.transports()
        self.engines = [
            Engine(
                {stage: stages[stage] for stage in self.schedule.stages_of(rank)},
                PointToPointChannel(transport, separate_headers=headers_ahead),
                self.reduced.append,
                Trace(),
            )
            for rank, transport in enumerate(self.transports)
        ]

    def _stages(self) -> list[Stage]:
        shared = TiedGradients()
        blocks = [[self.blocks[i] for i in run] for run in self.runs]
        first = FirstStage(user=self.user, tied=shared, queue=self.queues[0])
        last = LastStage(blocks=blocks[-1], first=first, queue=self.queues[-1])
        middle = zip(blocks[1:-1], self.queues[1:-1], strict=True)
        return [first, *(MiddleStage(blocks=own, queue=queue) for own, queue in middle), last]

    def run(
        self,
        step: Callable[[int], Any],
        weights: Sequence[float],
        *,
        train: bool = True,
        signature: int = 0,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Any]:
        """Run one batch, every rank within `context`; return the step's results."""
        schedule = self.schedule if train else forward_only(self.schedule)
        batch = Batch(signature, step=step, loss_weights=weights, num_microbatches=len(weights))

        def run(rank: int, engine: Engine) -> None:
            with context(), self.transports[rank].running():
                engine.begin_batch()
                engine.run(Program.from_schedule(schedule, rank), batch)
                engine.end_batch()

        run_in_threads([partial(run, rank, engine) for rank, engine in enumerate(self.engines)])
        return [batch.results[m] for m in range(schedule.num_microbatches)]

    def close(self) -> None:
        """End the step threads and give the blocks their own forward back."""
        self.user.close()
        forward_patch.unpatch_blocks(self.blocks)
        split_backward.unpatch_linear_layers(self.blocks)

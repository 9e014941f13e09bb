"""A whole pipeline in one process: every rank a thread, one shared model, loopback transports."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from lightning_hanayo.partition.cut import cut
from lightning_hanayo.runtime import bridge, swap
from lightning_hanayo.runtime.engine import Engine
from lightning_hanayo.runtime.loopback import Hub
from lightning_hanayo.runtime.mail import Mail
from lightning_hanayo.runtime.program import Program
from lightning_hanayo.runtime.shared_gradients import SharedGradients
from lightning_hanayo.runtime.stage import FirstStage, LastStage, MiddleStage, Stage
from lightning_hanayo.runtime.trace import Trace
from lightning_hanayo.runtime.user_step import UserStep
from lightning_hanayo.runtime.weight_queue import WeightQueue
from lightning_hanayo.schedule import Schedule, forward_only, with_loss_stage
from tests.harness.limits import real_seconds


class LoopbackPipeline:
    """Plays `schedule` over the blocks of a model that all ranks share."""

    def __init__(self, blocks: Sequence[nn.Module], schedule: Schedule) -> None:
        self.schedule = with_loss_stage(schedule)
        self.blocks = list(blocks)
        num_stages = self.schedule.num_stages - self.schedule.loss_stage
        self.runs = [*cut([1.0] * len(self.blocks), num_stages), *([range(0)] if self.schedule.loss_stage else [])]
        self.queues = [WeightQueue() for _ in self.runs]
        for run, queue in zip(self.runs, self.queues, strict=True):
            swap.install([self.blocks[i] for i in run], queue)
        bridge.install(self.blocks)
        self.reduced: list[int] = []
        self.user = UserStep(self.blocks, len(self.runs[0]), "blocks")
        stages = self._stages()
        self.engines = [
            Engine(
                {stage: stages[stage] for stage in self.schedule.stages_of(rank)},
                Mail(transport),
                self.reduced.append,
                Trace(),
            )
            for rank, transport in enumerate(Hub(self.schedule.num_ranks, timeout=real_seconds(30)).transports())
        ]

    def _stages(self) -> list[Stage]:
        shared = SharedGradients()
        blocks = [[self.blocks[i] for i in run] for run in self.runs]
        first = FirstStage(self.user, shared, self.queues[0])
        self.last = LastStage(blocks[-1], self.user, first, shared, self.queues[-1])
        middle = zip(blocks[1:-1], self.queues[1:-1], strict=True)
        return [first, *(MiddleStage(own, queue) for own, queue in middle), self.last]

    def run(
        self,
        step: Callable[[int], Any],
        weights: Sequence[float],
        *,
        train: bool = True,
        signature: int = 0,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> list[Any]:
        """Play one batch, every rank within `context`; return the step's results."""
        schedule = self.schedule if train else forward_only(self.schedule)
        self.user.begin(step)
        self.last.weights = weights
        errors: list[BaseException] = []

        def play(rank: int, engine: Engine) -> None:
            try:
                with context():
                    engine.play(Program.of(schedule, rank), signature)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=play, args=pair) for pair in enumerate(self.engines)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda e: isinstance(e, TimeoutError)):
            raise error
        return [self.last.results[m] for m in range(schedule.num_microbatches)]

    def close(self) -> None:
        """End the step threads and take the bridge away."""
        self.user.stop()
        bridge.remove(self.blocks)
        swap.remove(self.blocks)

"""The runner: one rank's part of a pipeline in one of the runtimes. Abstract; its leaves are in `ours` and `peer`."""

from abc import ABC, abstractmethod

from lightning_hanayo.schedule import Schedule
from recipes.benchmarks.emulated import EmulatedStage, gradient_of


class Runner(ABC):
    """Plays steps. Built on all ranks in the same order; its first steps agree shapes and connect, so play two."""

    schedule: Schedule
    """the order it really plays"""
    stages: dict[int, EmulatedStage]
    """this rank's"""

    @abstractmethod
    def run_step(self) -> None:
        """One step, forward and backward of all micro-batches."""

    @property
    @abstractmethod
    def losses(self) -> list[float]:
        """Of the last step, by micro-batch; empty where the last stage isn't."""

    def forget_gradients(self) -> None:
        """As an optimizer's `zero_grad`."""
        for stage in self.stages.values():
            stage.weight.grad = None

    @property
    def gradients(self) -> dict[int, float]:
        """Of the last step, by stage."""
        return {number: gradient_of(stage) for number, stage in self.stages.items()}

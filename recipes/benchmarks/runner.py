"""Declares a runner: one rank of a pipeline in our runtime (`ours`), torch's (`peer`) or none (`bare`)."""

from abc import ABC, abstractmethod

from lightning_hanayo.schedule import Schedule
from recipes.benchmarks.emulated import EmulatedStage, gradient_of


class Runner(ABC):
    """Runs steps. All ranks build runners in the same order. The first two steps connect ranks and agree on shapes."""

    schedule: Schedule
    """the order that it really runs"""
    stages: dict[int, EmulatedStage]
    """this rank's stages"""

    @abstractmethod
    def run_step(self) -> None:
        """Run one step: forward and backward of all micro-batches."""

    @property
    @abstractmethod
    def losses(self) -> list[float]:
        """Losses of the last step by micro-batch; empty on ranks without the last stage."""

    def zero_grad(self) -> None:
        """Set the gradients to None."""
        for stage in self.stages.values():
            stage.weight.grad = None

    @property
    def gradients(self) -> dict[int, float]:
        """Gradients of the last step, by stage."""
        return {number: gradient_of(stage) for number, stage in self.stages.items()}

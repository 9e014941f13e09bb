"""Runs the same emulated stages in the runtime of `torch.distributed.pipelining`."""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules
from typing_extensions import override

from lightning_hanayo.schedule import Schedule
from recipes.benchmarks.case import Candidate, Case
from recipes.benchmarks.emulated import EmulatedStage, inputs, loss_of
from recipes.benchmarks.names import TORCHS
from recipes.benchmarks.runner import Runner


class TorchRunner(Runner):
    """One of torch's schedules, or our table loaded into torch's runtime.

    torch is given all shapes, doesn't merge outputs, and scales gradients in the loss, as we do.

    Raises:
        ValueError, AssertionError, RuntimeError: torch can't run this schedule.
    """

    def __init__(self, case: Case, candidate: Candidate) -> None:
        self._case = case
        ours = case.schedule(candidate)  # stages are on the same ranks under every order
        times = case.times(ours.num_stages)
        self.stages = {number: EmulatedStage(number, times) for number in ours.stages_of(dist.get_rank())}
        stages = [torch_stage(stage, number, ours.num_stages, case.width) for number, stage in self.stages.items()]
        self._losses: list[Tensor] = []
        self._runtime = self._make(candidate, stages, ours)
        self.schedule = ours if candidate.name == "torch-1f1b" else _read(self._runtime)
        self._last = ours.num_stages - 1 in self.stages
        self._inputs = (inputs(case.num_microbatches, case.width),) if 0 in self.stages else ()
        self._targets = torch.zeros(case.num_microbatches, 1) if self._last else None

    def _make(self, candidate: Candidate, stages: list[PipelineStage], ours: Schedule) -> Any:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            return loss_of(output) / self._case.num_microbatches

        settings: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        kind = TORCHS[candidate.name]
        if kind == "Schedule1F1B":
            return schedules.Schedule1F1B(stages[0], self._case.num_microbatches, **settings)
        if kind:
            return getattr(schedules, kind)(stages, self._case.num_microbatches, **settings)
        runtime = schedules._PipelineScheduleRuntime(stages, self._case.num_microbatches, **settings)
        with tempfile.TemporaryDirectory() as directory:
            ours.to_csv(Path(directory) / "table.csv")
            runtime._load_csv(f"{directory}/table.csv", format="compute_only")
        return runtime

    @override
    def run_step(self) -> None:
        losses = self._losses if self._last else None
        self._runtime.step(*self._inputs, target=self._targets, losses=losses, return_outputs=False)

    @property
    @override
    def losses(self) -> list[float]:
        return [loss.item() * self._case.num_microbatches for loss in self._losses]


def torch_stage(module: torch.nn.Module, number: int, num_stages: int, width: int) -> PipelineStage:
    """torch's stage around `module`, with the given shapes [1, width] in and out."""
    entering = torch.empty(1, width, requires_grad=number > 0)
    leaving = torch.empty(1, width, requires_grad=True)
    return PipelineStage(
        module, number, num_stages, torch.device("cpu"), input_args=(entering,), output_args=(leaving,)
    )


def _read(runtime: Any) -> Schedule:
    """Read the schedule that one of torch's runtimes runs."""
    with tempfile.TemporaryDirectory() as directory:
        runtime._dump_csv(f"{directory}/order.csv", format="compute_only")
        return Schedule.from_csv(f"{directory}/order.csv")

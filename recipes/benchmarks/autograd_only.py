"""Runs only the sleeps, messages and gradients of a schedule, written out for the emulated stages.

    forward    wait for a buffer | stage | send its output          no headers, traces, random streams or structures:
    backward   wait for a buffer | autograd | send the gradient     every tensor is [1, width]

Next to `bare.py` it shows what autograd needs, and next to our runtime what the runtime needs besides.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_hanayo.pipeline_parallel.autograd.graph_boundary import run_backward
from lightning_hanayo.pipeline_parallel.engine import Communicate, Compute, Program
from lightning_hanayo.pipeline_parallel.message import MessageKey
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.transport import Transport, Work
from lightning_hanayo.schedule import Action, Kind
from recipes.benchmarks.case import Candidate, Case
from recipes.benchmarks.emulated import EmulatedStage, inputs, loss_of
from recipes.benchmarks.ours import world_transport
from recipes.benchmarks.runner import Runner


class AutogradRunner(Runner):
    """Runs the same program as our engine."""

    def __init__(self, case: Case, candidate: Candidate) -> None:
        self.schedule = case.schedule(candidate)
        self._transport: Transport = world_transport()
        self._program = Program.from_schedule(self.schedule, dist.get_rank())
        times = case.times(self.schedule.num_stages)
        self.stages = {number: EmulatedStage(number, times) for number in self.schedule.stages_of(dist.get_rank())}
        self._queues = {number: WeightGradientQueue() for number in self.stages}
        for number, stage in self.stages.items():
            stage.queue = self._queues[number]
        self._inputs = inputs(case.num_microbatches, case.width).split(1)
        self._share = torch.tensor(1 / case.num_microbatches)
        self._graphs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._losses: dict[int, Tensor] = {}

    @override
    def run_step(self) -> None:
        tensors: dict[MessageKey, Tensor] = {}
        arriving: dict[MessageKey, Work] = {}
        leaving: list[tuple[Work, Tensor]] = []
        for step in self._program.steps:
            if isinstance(step, Compute):
                if step.input_key in arriving:
                    arriving.pop(step.input_key).wait()
                received = None if step.input_key is None else tensors.pop(step.input_key)
                made = self._run(step.action, received)
                if step.output_key is not None and made is not None:
                    tensors[step.output_key] = made
            elif isinstance(step, Communicate):
                for key, peer in step.sends:
                    leaving.append((self._transport.send(peer, key.tag, tensors[key]), tensors.pop(key)))
                for key, peer in step.receives:
                    tensors[key] = torch.empty_like(self._inputs[0])
                    arriving[key] = self._transport.receive(peer, key.tag, tensors[key])
        for work, _ in leaving:
            work.wait()

    def _run(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Takes an input or the gradient of an output, and returns an output or the gradient of an input."""
        number, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        if action.kind is Kind.F:
            x = self._inputs[microbatch] if received is None else received.requires_grad_()
            y: Tensor = self.stages[number](x)
            if number == self.schedule.num_stages - 1:
                y = loss_of(y)
                self._losses[microbatch] = y.detach()
            self._graphs[number, microbatch] = x, y
            return y.detach()
        if action.kind is Kind.W:
            self._queues[number].drain(microbatch)
            return None
        x, output = self._graphs.pop((number, microbatch))
        gradient = self._share if received is None else received
        if action.kind is Kind.I:
            with self._queues[number].collecting(microbatch):
                run_backward([output], [gradient])
        else:
            run_backward([output], [gradient])
        gradient_of_input: Tensor | None = x.grad
        return gradient_of_input

    @property
    @override
    def losses(self) -> list[float]:
        return [loss.item() for _, loss in sorted(self._losses.items())]

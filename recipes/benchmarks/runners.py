"""Runs emulated stages on one rank of a pipeline: in our runtime, in torch's, or without one.

OurRunner        engine, point-to-point channel and gloo, connected as in the strategy
TorchRunner      `torch.distributed.pipelining`
AutogradRunner   only sleeps, messages and gradients, in a loop written for these stages: what autograd needs at least
BareRunner       only sleeps and messages: the least time that any runtime on this machine can need
"""

import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from typing_extensions import override

from lightning_hanayo.overlap.link_queue import Work
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.engine import Communicate, Compute, Engine, Program
from lightning_hanayo.pipeline_parallel.graph_boundary import run_backward
from lightning_hanayo.pipeline_parallel.p2p import MessageKey, PointToPointChannel
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import MiddleStage, Stage
from lightning_hanayo.pipeline_parallel.trace import Trace
from lightning_hanayo.pipeline_parallel.transport import ProcessGroupTransport, Transport
from lightning_hanayo.schedule import Action, Kind, Schedule
from recipes.benchmarks.case import TORCHS, Candidate, Case
from recipes.benchmarks.emulated import EmulatedStage, StageTimes, WithLoss, inputs, loss_of
from recipes.benchmarks.harness import sleep_until
from recipes.benchmarks.self_contained import SelfContainedFirstStage, SelfContainedLastStage


class Stack(ABC):
    """The model of a benchmark: blocks that are cut into equal stages, the last one with a loss, and its inputs."""

    num_blocks: int
    inputs: Sequence[Tensor]
    """by micro-batch"""

    @abstractmethod
    def blocks(self, stage: int, num_stages: int) -> list[nn.Module]:
        """The blocks of a stage, the same on every rank that makes them."""

    @abstractmethod
    def defer(self, blocks: Sequence[nn.Module], queue: WeightGradientQueue) -> None:
        """Let the queue take the blocks' weight gradients while a backward is split."""


class EmulatedStack(Stack):
    """Stages that sleep, of a block each."""

    def __init__(self, case: Case, num_stages: int) -> None:
        self.num_blocks = num_stages
        self.inputs = inputs(case.num_microbatches, case.width).split(1)
        self._times = case.times(num_stages)

    @override
    def blocks(self, stage: int, num_stages: int) -> list[nn.Module]:
        return [EmulatedStage(stage, self._times)]

    @override
    def defer(self, blocks: Sequence[nn.Module], queue: WeightGradientQueue) -> None:
        (stage,) = blocks
        assert isinstance(stage, EmulatedStage)
        stage.queue = queue


class Runner(ABC):
    """Runs steps. All ranks build runners in the same order. The first two steps connect ranks and agree on shapes.

    Args:
        schedule: the order of the actions.
        stack: the model, of which this rank holds the stages that the schedule gives it.
        transport: the transport between the pipeline's ranks; None: all ranks of the world are one pipeline.
    """

    def __init__(self, schedule: Schedule, stack: Stack, transport: Transport | None = None) -> None:
        self.schedule, self.stack = schedule, stack
        self.transport = transport or transport_of(range(dist.get_world_size()))
        self.stages = {
            number: stack.blocks(number, schedule.num_stages) for number in schedule.stages_of(self.transport.rank)
        }
        self._parameters = [one for blocks in self.stages.values() for block in blocks for one in block.parameters()]

    @abstractmethod
    def run_step(self) -> None:
        """Run one step: forward and backward of all micro-batches."""

    @property
    def losses(self) -> list[float]:
        """Losses of the last step by micro-batch; empty on ranks without the last stage."""
        return []

    def zero_grad(self) -> None:
        """Set the gradients to None."""
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def is_last(self) -> bool:
        """Whether this rank has the loss."""
        return self.schedule.num_stages - 1 in self.stages


def transport_of(ranks: Sequence[int], group: dist.ProcessGroup | None = None) -> ProcessGroupTransport:
    """A transport over these ranks, as one pipeline, whose group is the world's or another one."""
    control = group or dist.group.WORLD
    assert control is not None
    return ProcessGroupTransport(ranks, control=control, channels={}, device=torch.device("cpu"), on_failure=_fail)


def _fail(error: Exception) -> NoReturn:
    raise error


class OurRunner(Runner):
    """Our engine and its stages.

    Args:
        schedule: the order of the actions.
        stack: the model.
        transport: the transport between the pipeline's ranks; None: all ranks of the world are one pipeline.
        reduce: called with a stage's number when its gradients are complete.
    """

    def __init__(
        self,
        schedule: Schedule,
        stack: Stack,
        transport: Transport | None = None,
        reduce: Callable[[int], None] = lambda _: None,
    ) -> None:
        super().__init__(schedule, stack, transport)
        count = schedule.num_microbatches
        self._batch = Batch(inputs=list(stack.inputs), loss_weights=[1 / count] * count)
        self._program = Program.from_schedule(schedule, self.transport.rank)
        runs = {number: self._run(number, blocks) for number, blocks in self.stages.items()}
        self._engine = Engine(runs, PointToPointChannel(self.transport), reduce, Trace())

    def _run(self, number: int, blocks: list[nn.Module]) -> Stage:
        queue = WeightGradientQueue()
        self.stack.defer(blocks, queue)
        if number == self.schedule.num_stages - 1:
            return SelfContainedLastStage(blocks=[*blocks[:-1], WithLoss(blocks[-1])], queue=queue)
        if number == 0:
            return SelfContainedFirstStage(blocks=blocks, queue=queue, num_blocks=self.stack.num_blocks)
        return MiddleStage(blocks=blocks, queue=queue)

    @override
    def run_step(self) -> None:
        self._engine.run(self._program, self._batch)

    @property
    @override
    def losses(self) -> list[float]:
        return [loss.item() for _, loss in sorted(self._batch.results.items())]


class TorchRunner(Runner):
    """One of torch's schedules, or our table loaded into torch's runtime.

    torch is given all shapes, doesn't merge outputs, and scales gradients in the loss, as we do.

    Args:
        schedule: ours; stages are on the same ranks under every order.
        stack: the model.
        kind: torch's schedule; "": ours.

    Raises:
        ValueError, AssertionError, RuntimeError: torch can't run this schedule.
    """

    def __init__(self, schedule: Schedule, stack: Stack, kind: str) -> None:
        super().__init__(schedule, stack)
        self._count = schedule.num_microbatches
        self._losses: list[Tensor] = []
        self._runtime = self._make(kind)
        self._inputs = (torch.cat(list(stack.inputs)),) if 0 in self.stages else ()
        self._targets = torch.zeros(self._count, 1) if self.is_last else None
        if kind != "Schedule1F1B":
            self.schedule = _read(self._runtime)

    def _make(self, kind: str) -> Any:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            return loss_of(output) / self._count

        stages = [self._stage(number, blocks) for number, blocks in self.stages.items()]
        settings: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        if kind == "Schedule1F1B":
            return schedules.Schedule1F1B(stages[0], self._count, **settings)
        if kind:
            return getattr(schedules, kind)(stages, self._count, **settings)
        runtime = schedules._PipelineScheduleRuntime(stages, self._count, **settings)
        with tempfile.TemporaryDirectory() as directory:
            self.schedule.to_csv(Path(directory) / "table.csv")
            runtime._load_csv(f"{directory}/table.csv", format="compute_only")
        return runtime

    def _stage(self, number: int, blocks: list[nn.Module]) -> PipelineStage:
        """torch's stage, with the given shapes in and out."""
        module = blocks[0] if len(blocks) == 1 else nn.Sequential(*blocks)
        shape = self.stack.inputs[0].shape
        entering, leaving = (torch.empty(shape, requires_grad=needs) for needs in (number > 0, True))
        return PipelineStage(
            module, number, self.schedule.num_stages, torch.device("cpu"), input_args=(entering,),
            output_args=(leaving,),
        )  # fmt: skip

    @override
    def run_step(self) -> None:
        losses = self._losses if self.is_last else None
        self._runtime.step(*self._inputs, target=self._targets, losses=losses, return_outputs=False)

    @property
    @override
    def losses(self) -> list[float]:
        return [loss.item() * self._count for loss in self._losses]


def _read(runtime: Any) -> Schedule:
    """Read the schedule that one of torch's runtimes runs."""
    with tempfile.TemporaryDirectory() as directory:
        runtime._dump_csv(f"{directory}/order.csv", format="compute_only")
        return Schedule.from_csv(f"{directory}/order.csv")


class AutogradRunner(Runner):
    """Runs the same program as our engine, without headers, traces, random streams or structures."""

    def __init__(self, schedule: Schedule, stack: Stack) -> None:
        super().__init__(schedule, stack)
        self._program = Program.from_schedule(schedule, self.transport.rank)
        self._queues = {number: WeightGradientQueue() for number in self.stages}
        for number, blocks in self.stages.items():
            stack.defer(blocks, self._queues[number])
        self._share = torch.tensor(1 / schedule.num_microbatches)
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
                    leaving.append((self.transport.send(peer, key.tag, tensors[key]), tensors.pop(key)))
                for key, peer in step.receives:
                    tensors[key] = torch.empty_like(self.stack.inputs[0])
                    arriving[key] = self.transport.receive(peer, key.tag, tensors[key])
        for work, _ in leaving:
            work.wait()

    def _run(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Takes an input or the gradient of an output, and returns an output or the gradient of an input."""
        number, microbatch = action.stage, action.microbatch
        assert microbatch is not None
        if action.kind is Kind.F:
            x = self.stack.inputs[microbatch] if received is None else received.requires_grad_()
            (stage,) = self.stages[number]
            y: Tensor = stage(x)
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
        with self._queues[number].collecting(microbatch) if action.kind is Kind.I else nullcontext():
            run_backward([output], [gradient])
        gradient_of_input: Tensor | None = x.grad
        return gradient_of_input

    @property
    @override
    def losses(self) -> list[float]:
        return [loss.item() for _, loss in sorted(self._losses.items())]


class BareRunner(Runner):
    """Runs the same program as our engine.

    Buffers are allocated before a step begins, and no tensor is computed or read. What is left is how late sleeps end,
    and what gloo needs for a message.
    """

    def __init__(self, schedule: Schedule, stack: Stack, times: StageTimes) -> None:
        super().__init__(schedule, stack)
        seconds = {
            Kind.F: times.forward,
            Kind.B: times.backward_input + times.backward_weight,
            Kind.I: times.backward_input,
            Kind.W: times.backward_weight,
        }
        self._instructions: list[tuple[MessageKey | None, float] | tuple[list[Buffer], list[Buffer]]] = []
        for move in Program.from_schedule(schedule, self.transport.rank).steps:
            if isinstance(move, Compute):
                self._instructions.append((None if move.is_local else move.input_key, seconds[move.action.kind]))
            elif isinstance(move, Communicate):
                sends, receives = (
                    [(key, peer, torch.zeros(stack.inputs[0].numel())) for key, peer in messages]
                    for messages in (move.sends, move.receives)
                )
                self._instructions.append((sends, receives))

    @override
    def run_step(self) -> None:
        arriving: dict[MessageKey, Work] = {}
        leaving: list[Work] = []
        for first, second in self._instructions:
            if isinstance(second, list):
                assert isinstance(first, list)
                leaving += [self.transport.send(peer, key.tag, buffer) for key, peer, buffer in first]
                for key, peer, buffer in second:
                    arriving[key] = self.transport.receive(peer, key.tag, buffer)
                continue
            if isinstance(first, MessageKey):
                arriving.pop(first).wait()
            sleep_until(time.monotonic() + second)
        for work in leaving:
            work.wait()


Buffer = tuple[MessageKey, int, Tensor]
"""message key, the peer's rank, and the buffer"""


def runner_of(case: Case, candidate: Candidate) -> Runner:
    """Build a candidate's runner of a case.

    Raises:
        ValueError, AssertionError, RuntimeError: torch can't run this schedule.
    """
    schedule = case.schedule(candidate)
    stack = EmulatedStack(case, schedule.num_stages)
    match candidate.runtime:
        case "ours":
            return OurRunner(schedule, stack)
        case "torch":
            return TorchRunner(schedule, stack, TORCHS[candidate.name])
        case "autograd":
            return AutogradRunner(schedule, stack)
        case "bare":
            return BareRunner(schedule, stack, case.times(schedule.num_stages))

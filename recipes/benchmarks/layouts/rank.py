"""What each host runs: a probe of the links, all layouts in turn, then the paper's comparison."""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.overlap.link_queue import LinkQueue
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.grad_sync import GradientAllReduce
from lightning_hanayo.pipeline_parallel.p2p import PointToPointChannel
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import MiddleStage, Stage
from lightning_hanayo.pipeline_parallel.trace import Trace
from lightning_hanayo.planner.candidates import Candidate
from lightning_hanayo.planner.layout import COSTS, PAIR_SEGMENTS, Layout
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.topology import Topology
from recipes.benchmarks.case import Candidate as Named
from recipes.benchmarks.case import Case
from recipes.benchmarks.harness import in_turn
from recipes.benchmarks.layouts.cases import HOSTS, INSTANT, PROBES, Contender, Model, contenders
from recipes.benchmarks.rounds import agreed_start, message_time
from recipes.benchmarks.runners import EmulatedStack, OurRunner, transport_of
from recipes.benchmarks.schemes.dimensions import ThreeD
from recipes.benchmarks.schemes.layer import Device, Emulated, Layer, WholeLinear, shapes
from recipes.benchmarks.schemes.log import Log
from recipes.benchmarks.self_contained import (
    SelfContainedFirstStage,
    SelfContainedLastStage,
)
from recipes.benchmarks.tensor3d_rank import HEAD_START, Groups

QUIET = 0.02
REPEATS, PROBED = 7, (16 << 10, 1 << 20)
"""repeats, and bytes of a rank's part, of the collectives by which the links are measured"""
SHARE_SECONDS, MESSAGE_FLOATS = 0.02, 4096
"""the paper's comparison: a forward through a rank's share on all hosts, half of a backward; and floats of a message"""


@dataclass(frozen=True)
class Plan:
    """What all hosts run."""

    model: Model
    layouts: tuple[Candidate, ...]
    rounds: int
    pipes: tuple[int, ...] = ()
    """P of the paper's comparisons"""


@dataclass
class Record:
    """Of one host: seconds from the agreed start, by round."""

    collective: dict[int, float] = field(default_factory=dict)
    """an all-gather of all hosts, by the bytes of a part"""
    messages: dict[int, float] = field(default_factory=dict)
    """between the first two hosts, by floats"""
    runtime: list[float] = field(default_factory=list)
    """steps of the layouts `PROBES` without compute, and of the contender `INSTANT`"""
    steps: list[list[float]] = field(default_factory=list)
    """by layout"""
    contenders: dict[int, list[list[float]]] = field(default_factory=dict)
    """by P, by contender"""


def work(rank: int, plan: Plan) -> Record:
    """Run all of it on one host."""
    groups = Groups(rank)
    record = Record()
    _probe(groups, record)
    instant = [LayoutRunner(one, plan.model.instant, rank, groups).run for one in PROBES]
    instant.append(_contender(INSTANT, rank, groups, seconds=0.0, floats=1))
    record.runtime = [median(ends) for ends in alternate(instant, REPEATS)]
    runners: list[Callable[[], None]] = [LayoutRunner(one, plan.model, rank, groups).run for one in plan.layouts]
    record.steps = alternate(runners, plan.rounds)
    for pipe in plan.pipes:
        record.contenders[pipe] = alternate([_contender(one, rank, groups) for one in contenders(pipe)], plan.rounds)
    return record


def _probe(groups: Groups, record: Record) -> None:
    world = dist.group.WORLD
    assert world is not None
    axis = Mesh((HOSTS, 1, 1), dist.get_rank(), lambda _: world).axis("x")
    for size in PROBED:
        part = torch.zeros(size // 4)
        taken = []
        for _ in range(REPEATS + 1):
            start = agreed_start(HEAD_START)
            axis.all_gather(part).wait()
            taken.append(time.monotonic() - start)
        record.collective[size] = median(taken[1:])
    record.messages = {floats: message_time(torch.zeros(floats), REPEATS) for floats in (1, MESSAGE_FLOATS)}


def alternate(runners: Sequence[Callable[[], None]], rounds: int) -> list[list[float]]:
    """Run each once in each round, beginning with another one, after a round that isn't counted.

    It connects ranks, tells them the shapes of messages, and shows layers in which order weights are gathered.
    """
    taken: list[list[float]] = [[] for _ in runners]
    for counts, place in in_turn(range(len(runners)), rounds, warm_up=1):
        start = agreed_start(HEAD_START)
        runners[place]()
        end = time.monotonic() - start
        dist.barrier()
        time.sleep(QUIET)
        if counts:
            taken[place].append(end)
    return taken


class LayoutRunner:
    """One layout on one host: real layers, whose products take a set time; real messages and collectives.

    Args:
        candidate: the layout.
        model: the model.
        rank: this host's.
        groups: makes process groups.
        device: computes; None: one that sleeps.
        pairs: whether two micro-batches run at once.
    """

    def __init__(
        self,
        candidate: Candidate,
        model: Model,
        rank: int,
        groups: Groups,
        device: Device | None = None,
        *,
        pairs: bool = False,
    ) -> None:
        self._device = Emulated(model.flops_per_second, Log()) if device is None else device
        self._candidate = candidate
        topology = candidate.topology
        self.topology, self.rank = topology, rank
        axes = {
            axis: groups.find([tuple(one) for one in topology.groups(axis)], axis) for axis in ("pipe", *"xyz", "data")
        }
        cube_rank = rank % candidate.cube_size
        self._queue = LinkQueue() if pairs else None
        mesh = Mesh(
            candidate.mesh, cube_rank, lambda names: axes[names] if len(names) == 1 else None, queue=self._queue
        )
        layout = self.layout_of(candidate, pairs=pairs)
        self.schedule = layout.table(candidate.num_microbatches)
        self._pipe_rank = topology.coordinates(rank)[1]
        per_stage = model.layers // self.schedule.num_stages
        self.stages: dict[int, nn.Sequential] = {}
        runs: dict[int, Stage] = {}
        schemes = []
        for number in self.schedule.stages_of(self._pipe_rank):
            queue = WeightGradientQueue()
            turns = None if self._queue is None else self._queue.turns
            scheme = ThreeD(mesh, queue=queue if candidate.pipe > 1 else None, turns=turns)
            schemes.append(scheme)
            weights = [weights_of(model, number * per_stage + place) for place in range(per_stage)]
            self.stages[number] = scheme.layers(weights, self._device, model.seq)
            if candidate.pipe > 1:
                runs[number] = self._stage(number, scheme, queue)
        self._schemes = schemes
        self._inputs = self._micro_batches(model, schemes[0])
        self._reduction = GradientAllReduce(
            {number: list(stage.parameters()) for number, stage in self.stages.items()}, axes["data"]
        )
        self._engine: Engine | None = None
        if candidate.pipe > 1:
            transport = transport_of(topology.group_of(rank, "pipe"), axes["pipe"])
            turns = None if self._queue is None else self._queue.turns
            if turns is not None:
                turns.states = [stage.queue for stage in runs.values()]
            self._engine = Engine(runs, PointToPointChannel(transport), self._reduction.start, Trace(), turns=turns)
            self._program = Program.from_schedule(self.schedule, self._pipe_rank)
        count = candidate.num_microbatches
        self._batch = Batch(inputs=self._inputs, loss_weights=[1 / count] * count)

    @staticmethod
    def layout_of(candidate: Candidate, *, pairs: bool) -> Layout:
        """The candidate's layout, with pairs or without."""
        costs = replace(COSTS, segments=PAIR_SEGMENTS) if pairs else COSTS
        return Layout(
            candidate.schedule,
            candidate.pipe,
            candidate.num_waves,
            candidate.num_microbatches,
            costs=costs,
            pairs=pairs,
        )

    def close(self) -> None:
        """End the threads of pairs."""
        if self._queue is not None:
            self._queue.close()

    def _micro_batches(self, model: Model, scheme: ThreeD) -> list[Tensor]:
        """This rank's part of each micro-batch of its data rank."""
        of_rank = model.samples // self._candidate.data
        first = self.topology.coordinates(self.rank)[0] * of_rank
        rows = batch_of(model)[first : first + of_rank]
        return [scheme.cut(one).clone().requires_grad_() for one in rows.split(self._candidate.samples)]

    def _stage(self, number: int, scheme: ThreeD, queue: WeightGradientQueue) -> Stage:
        blocks: list[nn.Module] = list(self.stages[number])
        hooks: Any = scheme.context
        if number == 0:
            return SelfContainedFirstStage(blocks=blocks, queue=queue, hooks=hooks, num_blocks=_ANY)
        if number == self.schedule.num_stages - 1:
            blocks[-1] = _WithLoss(blocks[-1], self._candidate)
            return SelfContainedLastStage(blocks=blocks, queue=queue, hooks=hooks)
        return MiddleStage(blocks=blocks, queue=queue, hooks=hooks)

    def run(self) -> None:
        """Run a step. Gradients stay until the next one begins."""
        for stage in self.stages.values():
            stage.zero_grad()
        multiplies = self._device.multiplies() if isinstance(self._device, Emulated) else nullcontext()
        with multiplies:
            if self._engine is not None:
                self._engine.begin_batch()
                self._engine.run(self._program, self._batch)
                self._engine.end_batch()
            else:
                self._run_alone()
        self._reduction.finish()

    def cut_weight(self, index: int, weight: Tensor) -> Tensor:
        """This host's part of a layer's `index`-th weight, or of its gradient."""
        return self._schemes[0].cut_weight(index, weight)

    def _run_alone(self) -> None:
        """One stage: micro-batches one after another."""
        context, (stage,) = self._schemes[0].context, self.stages.values()
        last = _WithLoss(stage, self._candidate)
        for x, weight in zip(self._inputs, self._batch.loss_weights, strict=True):
            context.before_forward()
            loss = last(x)
            context.before_backward()
            (loss * weight).backward()
        self._reduction.start(0)


_ANY = 1 << 16
"""blocks of a stack, of which the self-contained first stage needs to know that there are enough"""


def weights_of(model: Model, layer: int) -> list[Tensor]:
    """The four weights of a layer, the same on all hosts."""
    generator = torch.Generator().manual_seed(layer)
    scale = 0.5 / model.hidden**0.5
    return [scale * torch.randn(shape, generator=generator) for shape in shapes(model.hidden)]


def batch_of(model: Model) -> Tensor:
    """All samples of a step."""
    generator = torch.Generator().manual_seed(10**6)
    return torch.randn(model.samples, model.seq, model.hidden, generator=generator)


class _WithLoss(nn.Module):
    """The last layer, and its outputs' part of the mean over all ranks' outputs."""

    def __init__(self, layer: nn.Module, candidate: Candidate) -> None:
        super().__init__()
        self.layer = layer
        self._share = 1 / (candidate.data * candidate.cube_size)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a number."""
        loss: Tensor = self.layer(x).square().mean() * self._share
        return loss


def _contender(
    one: Contender, rank: int, groups: Groups, seconds: float = SHARE_SECONDS, floats: int = MESSAGE_FLOATS
) -> Callable[[], None]:
    """A schedule of the paper's comparison: stages sleep, messages are real."""
    topology = Topology(data=one.pipelines, pipe=one.pipe)
    group = groups.find([tuple(ranks) for ranks in topology.groups("pipe")], "pipe")
    case = case_of(one, seconds, floats)
    schedule = case.schedule(Named(one.schedule, one.waves))
    transport = transport_of(topology.group_of(rank, "pipe"), group)
    return OurRunner(schedule, EmulatedStack(case, schedule.num_stages), transport).run_step


def case_of(one: Contender, seconds: float = SHARE_SECONDS, floats: int = MESSAGE_FLOATS) -> Case:
    """The case of a contender: `share` of the model on each rank, T_B = 2 T_F."""
    time = seconds * one.share
    return Case(one.pipe, one.microbatches, time, time, time, 4 * floats, 1)


def check(rank: int, plan: Plan) -> list[float]:
    """Compute all layouts for real: the largest relative error of this host's gradients, by layout."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(rank)
    whole = _reference(plan.model)
    # All are kept to the end: a message that is still on its way is lost with the transport that sent it.
    runners = [LayoutRunner(one, plan.model, rank, groups, Device()) for one in plan.layouts]
    errors = []
    for runner in runners:
        dist.barrier()
        errors.append(_error(runner, plan.model, whole))
    return errors


def _reference(model: Model) -> list[list[Tensor]]:
    """The gradients of each layer's weights, in one process."""
    layers = [
        Layer([WholeLinear(one) for one in weights_of(model, i)], Device(), model.seq) for i in range(model.layers)
    ]
    x = batch_of(model)
    for layer in layers:
        x = layer(x)
    x.square().mean().backward()
    return [[gradient_of(linear) for linear in layer.linears] for layer in layers]


def gradient_of(module: nn.Module) -> Tensor:
    """Of its weight."""
    weight = module._parameters["weight"]
    assert weight is not None and weight.grad is not None
    return weight.grad


def _error(runner: LayoutRunner, model: Model, whole: list[list[Tensor]]) -> float:
    for _ in range(2):  # the second step gathers weights ahead
        runner.run()
    worst, per_stage = 0.0, model.layers // runner.schedule.num_stages
    for number, stage in runner.stages.items():
        for place, layer in enumerate(stage):
            for index, linear in enumerate(layer.linears):  # type: ignore[arg-type]
                expected = runner.cut_weight(index, whole[number * per_stage + place][index])
                worst = max(worst, float((gradient_of(linear) - expected).abs().max() / expected.abs().max()))
    return worst

"""What each host runs: all schemes, with their micro-batches one by one and in pairs, in turn; then pipelines of cubes.

A pipeline has two ranks, each a cube of four hosts, and runs with and without pairs.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.overlap.link_queue import LinkQueue
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.p2p import PointToPointChannel
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.trace import Trace
from lightning_hanayo.planner.candidates import WHOLE, Candidate
from lightning_hanayo.schedule import CostModel, simulate
from lightning_hanayo.schedule.cost import Segments, run_alone, run_by_turns
from recipes.benchmarks.cluster import Link
from recipes.benchmarks.harness import in_turn
from recipes.benchmarks.layouts.cases import BYTES, Model
from recipes.benchmarks.layouts.rank import LayoutRunner, alternate
from recipes.benchmarks.pairs.tables import table_of
from recipes.benchmarks.rounds import agreed_start
from recipes.benchmarks.runners import transport_of
from recipes.benchmarks.schemes.layer import Emulated, shapes
from recipes.benchmarks.schemes.log import Log, segments_of
from recipes.benchmarks.schemes.names import groups, make, three_d
from recipes.benchmarks.self_contained import SelfContainedSingleStage
from recipes.benchmarks.tensor3d import speed_of
from recipes.benchmarks.tensor3d_rank import HEAD_START, Case, Groups, dry_run

QUIET = 0.03
WARM = 2
"""micro-batches of the step that comes first: it shows the order of weights"""


@dataclass(frozen=True)
class Run:
    """One scheme, and how its micro-batches run."""

    scheme: str
    way: str
    queue: bool = True
    """whether collectives go on the wire one at a time"""


@dataclass(frozen=True)
class Plan:
    """What all hosts run."""

    case: Case
    runs: tuple[Run, ...]
    microbatches: tuple[int, ...]
    rounds: int


@dataclass
class Record:
    """Of one host."""

    steps: list[dict[int, list[float]]] = field(default_factory=list)
    """by run, by number of micro-batches: seconds from the agreed start, by round"""


def work(rank: int, plan: Plan) -> Record:
    """Run all of it on one host."""
    process_groups = Groups(rank)
    runners = [Runner(plan.case, run, process_groups) for run in plan.runs]
    for runner in runners:
        runner.step(WARM)
    record = Record([{count: [] for count in plan.microbatches} for _ in runners])
    for _, place in in_turn(range(len(runners)), plan.rounds):
        for count in plan.microbatches:
            record.steps[place][count].append(runners[place].step(count))
    for runner in runners:
        runner.close()
    return record


class Runner:
    """One scheme on one host, on emulated devices: real collectives, real engine.

    Args:
        case: what is computed.
        run: which scheme, and how its micro-batches run.
        process_groups: makes the groups of hosts.
    """

    def __init__(self, case: Case, run: Run, process_groups: Groups) -> None:
        self.way = run.way
        self._case = case
        self._queue = LinkQueue()
        rank, queue = process_groups.rank, self._queue if run.queue else None
        for among in groups(run.scheme, case.hosts).values():
            process_groups.find(among)
        log = Log()
        self._device = Emulated(case.flops_per_second, log)
        scheme = make(run.scheme, case.hosts, rank, process_groups.find, log, queue)
        with torch.no_grad():  # no values: none are computed
            weights = [[torch.zeros(shape) for shape in shapes(case.hidden)] for _ in range(case.layers)]
            self._x = scheme.cut(torch.zeros(case.batch, case.seq, case.hidden))
        layers = scheme.layers(weights, self._device, case.seq)
        weight_queue = WeightGradientQueue()
        stage = SelfContainedSingleStage(
            blocks=[*layers, _Loss()], queue=weight_queue, hooks=scheme.hooks, num_blocks=case.layers + 1
        )
        self._queue.turns.states = [weight_queue]
        channel = PointToPointChannel(transport_of([rank]))
        self._engine = Engine({0: stage}, channel, lambda _: None, Trace(), turns=self._queue.turns)
        self._parameters = list(layers.parameters())

    def step(self, num_microbatches: int) -> float:
        """Run a step on all hosts at once, and return the seconds that it took this one."""
        program = Program.from_schedule(table_of(self.way, num_microbatches), 0)
        inputs = [self._x.detach().clone().requires_grad_() for _ in range(num_microbatches)]
        batch = Batch(inputs=inputs, loss_weights=[1.0] * num_microbatches)
        for parameter in self._parameters:
            parameter.grad = None
        start = agreed_start(HEAD_START)
        self._engine.begin_batch()
        with self._device.multiplies():
            self._engine.run(program, batch)
        self._engine.end_batch()
        end = time.monotonic() - start
        dist.barrier()
        time.sleep(QUIET)
        return end

    def close(self) -> None:
        """End the threads."""
        self._queue.close()


def parts_of(case: Case, scheme: str, link: Link) -> tuple[Segments, Segments]:
    """A forward and a backward of the scheme: when a host computes, and when it uses the link."""
    return segments_of(dry_run(case, scheme), link.bytes_per_second / BYTES)


def predict_pairs(case: Case, scheme: str, link: Link, num_microbatches: int) -> float:
    """Seconds of a step in pairs, on an ideal network; with weights that are gathered for each micro-batch."""
    forward, backward = parts_of(case, scheme, link)
    ends = run_by_turns(forward).length + run_by_turns(backward).length
    return ends + (num_microbatches - 1) * run_by_turns(forward, backward).length


class _Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten()[0]


MESHES = (2, 2, 1), (4, 1, 1)
PIPE = 2


@dataclass(frozen=True)
class Pipes:
    """What is run: each mesh with these numbers of micro-batches, without pairs and with them."""

    model: Model
    samples: int
    """of a micro-batch"""
    microbatches: tuple[int, ...]
    rounds: int

    @property
    def candidates(self) -> list[Candidate]:
        """The layouts, each of which runs twice."""
        return [
            Candidate(1, PIPE, mesh, 1, self.samples, count, schedule=WHOLE)
            for mesh in MESHES
            for count in self.microbatches
        ]


@dataclass
class PipeRecord:
    """Of one host: seconds from the agreed start."""

    steps: list[list[float]] = field(default_factory=list)
    """of each candidate without pairs and with them, by round"""


def pipes_of(link: Link, hidden: int, rounds: int = 1) -> Pipes:
    """Micro-batches of 8 sequences, two thirds of `hidden` long and wide; 1-D would communicate for 70 %."""
    width = 2 * hidden // 3 // 8 * 8
    speed = speed_of(link, 8 * width, width)
    return Pipes(Model(4, width, width, 0, speed), 8, (4, 8), rounds)


def work_pipes(rank: int, pipes: Pipes) -> PipeRecord:
    """Run all of it on one host."""
    groups, record = Groups(rank), PipeRecord()
    runners = []
    for one in pipes.candidates:
        model = Model(pipes.model.layers, pipes.model.hidden, pipes.model.seq, one.samples_per_step,
                      pipes.model.flops_per_second)  # fmt: skip
        runners += [LayoutRunner(one, model, rank, groups), LayoutRunner(one, model, rank, groups, pairs=True)]
    record.steps = alternate([runner.run for runner in runners], pipes.rounds)
    for runner in runners:
        runner.close()
    return record


@dataclass(frozen=True)
class PipeResult:
    """One layout. Seconds."""

    layout: str
    alone: float
    paired: float
    simulated_alone: float
    simulated: float

    @property
    def gain(self) -> float:
        """The step without pairs / with them."""
        return self.alone / self.paired


def pipe_results_of(pipes: Pipes, records: Sequence[PipeRecord], link: Link) -> list[PipeResult]:
    """Put the hosts' records together, with the simulation of each layout on an ideal network."""
    found = []
    for place, candidate in enumerate(pipes.candidates):
        alone, paired = (
            median(max(record.steps[2 * place + way][turn] for record in records) for turn in range(pipes.rounds))
            for way in (0, 1)
        )
        tables = [
            LayoutRunner.layout_of(candidate, pairs=way).table(candidate.num_microbatches) for way in (False, True)
        ]
        costs = _costs(pipes, candidate.mesh, tables[0].num_stages, link)
        simulated = [simulate(table, costs).makespan for table in tables]
        found.append(PipeResult(str(candidate), alone, paired, *simulated))
    return found


def _costs(pipes: Pipes, mesh: tuple[int, int, int], num_stages: int, link: Link) -> CostModel:
    """The costs of equal stages, each a cube of hosts."""
    model, samples, stages_per_rank = pipes.model, pipes.samples, num_stages / PIPE
    tokens, layers = samples * model.seq, model.layers // num_stages
    case = Case("", prod(mesh), tokens, model.hidden, (), model.flops_per_second, layers, batch=samples)
    forward, backward = parts_of(case, three_d(mesh), link)
    half = stages_per_rank * run_alone(backward) / 2
    return CostModel(
        stages_per_rank * run_alone(forward),
        half,
        half,
        message=BYTES * tokens * model.hidden / prod(mesh) / link.bytes_per_second,
        segments=(("F", tuple(forward)), ("B", tuple(backward))),
    )

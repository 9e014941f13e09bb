"""What each host runs: all schemes, with their micro-batches one by one and in pairs, in turn."""

import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.overlap.link_queue import LinkQueue
from lightning_hanayo.overlap.pair_time import run_pair
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.comm.object_collectives import broadcast_object
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.p2p import PointToPointChannel
from lightning_hanayo.pipeline_parallel.pairs import Pairs, kinds_of
from lightning_hanayo.pipeline_parallel.profiling.trace import Trace
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from recipes.benchmarks.harness import in_turn
from recipes.benchmarks.pairs.tables import ALONE, table_of
from recipes.benchmarks.runners import transport_of
from recipes.benchmarks.schemes.layer import Emulated, shapes
from recipes.benchmarks.schemes.log import Log
from recipes.benchmarks.schemes.names import groups, keeps_weights, make
from recipes.benchmarks.self_contained import SelfContainedSingleStage
from recipes.benchmarks.tensor3d_rank import Case, Groups, agreed_start

QUIET = 0.03
WARM = (2, 4, 2)
"""micro-batches of the steps that come first: they show the order of weights, what a pair does, and how a planned one
runs"""


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
    predicted: list[dict[int, float]] = field(default_factory=list)
    """by run in pairs, by number of micro-batches: what the first host planned with; empty on other hosts"""


def work(rank: int, plan: Plan) -> Record:
    """Run all of it on one host."""
    process_groups = Groups(rank)
    runners = [Runner(plan.case, run, process_groups) for run in plan.runs]
    for runner in runners:
        for count in WARM[:1] if runner.way == ALONE else WARM:
            runner.step(count)
    record = Record([{count: [] for count in plan.microbatches} for _ in runners])
    for _, place in in_turn(range(len(runners)), plan.rounds):
        for count in plan.microbatches:
            record.steps[place][count].append(runners[place].step(count))
    for runner in runners:
        record.predicted.append({count: runner.predict(count) for count in plan.microbatches if runner.can_predict})
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
        self._keeps_weights = keeps_weights(run.scheme)
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
        pairs = self._pairs = Pairs(self._queue, [weight_queue], broadcast_object, is_first=rank == 0)
        channel = PointToPointChannel(transport_of([rank]))
        self._engine = Engine({0: stage}, channel, lambda _: None, Trace(), pairs=pairs)
        self._parameters = list(layers.parameters())

    def step(self, num_microbatches: int) -> float:
        """Run a step on all hosts at once, and return the seconds that it took this one."""
        program = Program.from_schedule(table_of(self.way, num_microbatches), 0)
        inputs = [self._x.detach().clone().requires_grad_() for _ in range(num_microbatches)]
        batch = Batch(inputs=inputs, loss_weights=[1.0] * num_microbatches)
        for parameter in self._parameters:
            parameter.grad = None
        start = agreed_start()
        self._engine.begin_batch()
        with self._device.multiplies():
            self._engine.run(program, batch)
        self._engine.end_batch()
        end = time.monotonic() - start
        dist.barrier()
        time.sleep(QUIET)
        return end

    @property
    def can_predict(self) -> bool:
        """Whether this host has recorded what pairs do, and what runs alone does the same."""
        return bool(self._pairs.segments) and not self._keeps_weights

    def predict(self, num_microbatches: int) -> float:
        """Seconds of such a step in the simulation that the plans are made with."""
        (plans,) = self._pairs.plans.values()
        table, segments = table_of(self.way, num_microbatches), self._pairs.segments
        seconds = set(table.partner_of.values())
        total = 0.0
        for action in table.actions[0]:
            partner = table.partner_of.get(action)
            if partner is not None:
                total += plans[kinds_of(action, partner)].seconds
            elif action not in seconds:
                alone = next(
                    own
                    for kind, own in segments.items()
                    if (kind.stage, kind.kind) == (action.stage, action.kind) and not (kind.is_twin and kind.slot)
                )
                total += run_pair(alone, ()).seconds
        return total

    def close(self) -> None:
        """End the threads."""
        self._queue.close()


class _Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten()[0]

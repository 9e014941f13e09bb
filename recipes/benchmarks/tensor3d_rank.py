"""What each host of the tensor-parallel benchmark runs: collectives, then all schemes of each case in turn."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

import torch
import torch.distributed as dist

from recipes.benchmarks.cluster import received
from recipes.benchmarks.harness import in_turn, sleep_until
from recipes.benchmarks.rounds import agreed_start
from recipes.benchmarks.schemes.dimensions import Wire, check
from recipes.benchmarks.schemes.layer import Emulated, shapes
from recipes.benchmarks.schemes.log import Event, Log
from recipes.benchmarks.schemes.names import Find, Group, groups, make

HEAD_START, QUIET, SAMPLE_S, SKEW = 0.01, 0.03, 0.004, 0.0004
COLLECTIVES = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce")


@dataclass(frozen=True)
class Case:
    """A step of `layers` layers with `batch` sequences on the first `hosts` hosts, `rounds` times."""

    title: str
    hosts: int
    tokens: int
    hidden: int
    schemes: tuple[str, ...]
    flops_per_second: float
    """of a host"""
    layers: int = 2
    rounds: int = 3
    batch: int = 8

    @property
    def seq(self) -> int:
        """The length of a sequence."""
        return self.tokens // self.batch


@dataclass(frozen=True)
class Plan:
    """The cases and collectives that are run."""

    cases: tuple[Case, ...]
    collectives: tuple[tuple[int, float], ...] = ()
    """hosts of a group, and megabytes that each has, or gets"""


@dataclass
class Steps:
    """One scheme on one host. Times in seconds after the agreed start; bytes with headers."""

    forward: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    spans: list[tuple[float, float]] = field(default_factory=list)
    """of the last step: when it computed"""
    samples: list[tuple[float, int]] = field(default_factory=list)
    """of one more step: bytes received so far"""


@dataclass(frozen=True)
class Collective:
    """One on one host: of gloo's own, and of ours, seconds after the last host's start, by round."""

    kind: str
    hosts: int
    megabytes: float
    gloo: list[float]
    ours: list[float]


@dataclass(frozen=True)
class Record:
    """The measurements of one host."""

    collectives: list[Collective]
    steps: list[dict[str, Steps]]
    """by case and scheme; empty where this host had no part"""


def work(rank: int, plan: Plan) -> Record:
    """Run the whole plan on one host."""
    process_groups = Groups(rank)
    log = Log()
    collectives = [_collective(process_groups, kind, *size, log) for size in plan.collectives for kind in COLLECTIVES]
    return Record(collectives, [_case(process_groups, case) for case in plan.cases])


class Groups:
    """The process groups. All hosts make them in the same order, once each."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._made: dict[tuple[str, Group], dist.ProcessGroup] = {}

    def find(self, among: Sequence[Group], purpose: str = "") -> dist.ProcessGroup | None:
        """Returns this host's group among these; those of one purpose are used for nothing else."""
        for ranks in among:
            if (purpose, ranks) not in self._made and len(ranks) > 1:
                group = dist.new_group(list(ranks))
                assert isinstance(group, dist.ProcessGroup) or self.rank not in ranks
                self._made[purpose, ranks] = group
        return next((self._made[purpose, ranks] for ranks in among if self.rank in ranks and len(ranks) > 1), None)


def _timed(action: Callable[[], object], times: int) -> list[float]:
    """From the last host's start; as in a step, they don't begin at one moment."""
    skew = SKEW * dist.get_rank()
    last = SKEW * (dist.get_world_size() - 1)
    ends = []
    for _ in range(times + 1):
        start = agreed_start(HEAD_START)
        sleep_until(start + skew)
        action()
        ends.append(time.monotonic() - start - last)
        time.sleep(QUIET)
    return ends[1:]


def _collective(
    process_groups: Groups, kind: str, hosts: int, megabytes: float, log: Log, times: int = 3
) -> Collective:
    world = dist.get_world_size()
    group = process_groups.find([tuple(range(first, first + hosts)) for first in range(0, world, hosts)])
    assert group is not None
    wire = Wire(group, hosts, process_groups.rank % hosts, log)
    whole = torch.zeros(hosts, int(megabytes * 2**20 / 4 / hosts))
    other, part = torch.zeros_like(whole), torch.zeros_like(whole[0])
    flat, other_flat = whole.view(-1), other.view(-1)
    gloo, ours = {
        "all-gather": (lambda: dist.all_gather_into_tensor(other_flat, part, group=group),
                       lambda: wire.all_gather(part)),
        "reduce-scatter": (lambda: dist.reduce_scatter_tensor(part, flat, group=group),
                           lambda: wire.reduce_scatter(whole)),
        "all-to-all": (lambda: dist.all_to_all_single(other_flat, flat, group=group), lambda: wire.all_to_all(whole)),
        "all-reduce": (lambda: dist.all_reduce(whole, group=group), lambda: wire.all_reduce(whole)),
    }[kind]  # fmt: skip
    return Collective(kind, hosts, megabytes, _timed(gloo, times), _timed(lambda: ours().wait(), times))


class StepRunner:
    """One scheme of a case on one host.

    Args:
        case: the case that is run.
        name: the scheme's.
        rank: the host's.
        find: finds its groups.
        is_dry: whether nothing is computed or sent, only logged.
    """

    def __init__(self, case: Case, name: str, rank: int, find: Find, *, is_dry: bool = False) -> None:
        self.log = Log()
        self.steps = Steps()
        self._device = Emulated(case.flops_per_second, self.log, is_dry=is_dry)
        self._scheme = make(name, case.hosts, rank, find, self.log)
        with torch.no_grad():  # no values: none are computed
            weights = [[torch.zeros(shape) for shape in shapes(case.hidden)] for _ in range(case.layers)]
            self._x = self._scheme.cut(torch.zeros(case.batch, case.seq, case.hidden))
        self._x.requires_grad_()  # as in the middle of a model
        self._model = self._scheme.layers(weights, self._device, case.seq)

    def run(self) -> tuple[float, float]:
        """Run forward and backward, and return when each ended."""
        self.log.clear()
        for tensor in (self._x, *self._model.parameters()):
            tensor.grad = None
        with self._device.multiplies():
            self._scheme.begin()
            y = self._model(self._x)
            between = time.monotonic()
            self.log.backward()
            y.backward(torch.zeros_like(y))
        return between, time.monotonic()


def dry_run(case: Case, name: str, rank: int = 0) -> list[Event]:
    """Returns what a host does in a step. Nothing is sent or computed, so there may be any number of hosts."""
    runner = StepRunner(case, name, rank, lambda _: None, is_dry=True)
    runner.run()  # records the order of the layers, which the second run prefetches by
    runner.run()
    return runner.log.events


def _case(process_groups: Groups, case: Case) -> dict[str, Steps]:
    for among in chain.from_iterable(groups(name, case.hosts).values() for name in case.schemes):
        process_groups.find(among)
    if process_groups.rank >= case.hosts:
        for _ in range((case.rounds + 2) * len(case.schemes)):
            agreed_start(HEAD_START)
            dist.barrier()
        return {}
    runners = {name: StepRunner(case, name, process_groups.rank, process_groups.find) for name in case.schemes}
    for counts, name in in_turn(case.schemes, case.rounds, warm_up=1):
        _run(runners[name], keep=counts)
    for runner in runners.values():
        with _sampled(runner.steps.samples) as begin:
            begin(_run(runner, keep=False))
        runner.steps.events, runner.steps.spans = runner.log.events, runner.log.spans
    return {name: runner.steps for name, runner in runners.items()}


def _run(runner: StepRunner, *, keep: bool) -> float:
    """Run one step on all hosts, and return when it started."""
    start = agreed_start(HEAD_START)
    before = received()
    forward, end = runner.run()
    dist.barrier()
    time.sleep(QUIET)
    if keep:
        runner.steps.forward.append(forward - start)
        runner.steps.end.append(end - start)
        runner.steps.received.append(received() - before)
    runner.log.spans[:] = [(begin - start, stop - start) for begin, stop in runner.log.spans]
    return start


@contextmanager
def _sampled(into: list[tuple[float, int]]) -> Iterator[Callable[[float], None]]:
    """Sample the bytes received every few milliseconds. The caller tells when the step began."""
    done = threading.Event()
    raw: list[tuple[float, int]] = []

    def look() -> None:
        while not done.wait(SAMPLE_S):
            raw.append((time.monotonic(), received()))

    starts: list[float] = []
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield starts.append
    finally:
        done.set()
        thread.join()
    into[:] = [(moment - starts[0], count) for moment, count in raw]


def check_all(rank: int, schemes: Sequence[tuple[str, int]]) -> dict[str, float]:
    """Run each scheme with real products on so many hosts, and return its error."""
    process_groups = Groups(rank)
    found = {}
    for name, hosts in schemes:
        for among in groups(name, hosts).values():
            process_groups.find(among)
        if rank < hosts:
            found[f"{name}, {hosts} hosts"] = check(name, hosts, rank, process_groups.find)
    return found

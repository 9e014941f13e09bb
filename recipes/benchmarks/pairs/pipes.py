"""Pipelines of cubes: two pipeline ranks, each a cube of four hosts, with and without pairs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from statistics import fmean, median

from lightning_hanayo.overlap.pair_time import Segments, run_alone
from lightning_hanayo.pipeline_parallel.pairs import RECORDED
from lightning_hanayo.planner.candidates import WHOLE, Candidate
from lightning_hanayo.schedule import CostModel, Schedule, simulate
from recipes.benchmarks.cluster import Link
from recipes.benchmarks.layouts.cases import BYTES, Model
from recipes.benchmarks.layouts.rank import LayoutRunner, alternate
from recipes.benchmarks.tensor3d import speed_of
from recipes.benchmarks.tensor3d_rank import Groups

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
    segments: list[dict[str, list[Segments]]] = field(default_factory=list)
    """of each candidate: what its stages do in pairs, by kind; empty where another host of the cube has recorded it"""
    schedules: list[Schedule] = field(default_factory=list)
    """of each candidate, in pairs"""


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
    for _ in range(RECORDED):  # and one more, which isn't counted either
        alternate([runner.run for runner in runners], 0)
    record.steps = alternate([runner.run for runner in runners], pipes.rounds)
    for runner in runners[1::2]:
        assert runner.pairs is not None
        kinds: dict[str, list[Segments]] = defaultdict(list)
        for kind, segments in runner.pairs.segments.items():
            kinds[kind.kind.value].append(segments)
        record.segments.append(dict(kinds))
        record.schedules.append(runner.schedule)
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
    """Put the hosts' records together, with the simulation of each layout by what its stages were recorded to do."""
    found = []
    message = BYTES * pipes.samples * pipes.model.seq * pipes.model.hidden / prod(MESHES[0]) / link.bytes_per_second
    for place, candidate in enumerate(pipes.candidates):
        alone, paired = (
            median(max(record.steps[2 * place + way][turn] for record in records) for turn in range(pipes.rounds))
            for way in (0, 1)
        )
        costs = _costs([record.segments[place] for record in records], message, 2)
        schedule = records[0].schedules[place]
        one_by_one = LayoutRunner.layout_of(candidate, pairs=False).table(candidate.num_microbatches)
        found.append(
            PipeResult(
                str(candidate), alone, paired, simulate(one_by_one, costs).makespan, simulate(schedule, costs).makespan
            )
        )
    return found


def _costs(recorded: Sequence[dict[str, list[Segments]]], message: float, stages_per_rank: int) -> CostModel:
    """The costs of equal stages, from what was recorded of some of them."""
    forwards, backwards = ([one for host in recorded for one in host.get(kind, [])] for kind in ("F", "B"))
    forward, backward = (fmean(map(run_alone, several)) for several in (forwards, backwards))
    return CostModel(
        stages_per_rank * forward,
        stages_per_rank * backward / 2,
        stages_per_rank * backward / 2,
        message=message,
        segments=(("F", tuple(forwards[0])), ("B", tuple(backwards[0]))),
    )

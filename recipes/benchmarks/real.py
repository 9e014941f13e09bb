"""Measures real computation on two ranks, and compares the gain of waves over 1F1B with the predicted gain.

Each rank has a core of its own and runs transformer blocks. First both ranks time their blocks (at the same time, so
that they disturb each other as they do later) and a message. The simulator predicts each schedule's step from these
times; then all schedules run in turn.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.pipeline_parallel import split_backward
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.p2p import gradient_message
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.schedule import CostModel, Schedule, build, simulate
from recipes.benchmarks.case import TORCHS, Candidate
from recipes.benchmarks.harness import (
    Columns,
    Findings,
    ProcessOptions,
    Summary,
    cores,
    ms,
    page,
    run_ranks,
    span,
    table,
)
from recipes.benchmarks.rounds import RoundTiming, in_rounds, message_time, step_time
from recipes.benchmarks.runners import OurRunner, Runner, Stack, TorchRunner
from recipes.benchmarks.self_contained import SelfContainedFirstStage
from recipes.gpt.module import Block
from recipes.paper.figure import BLUE, GREY, ORANGE, new, plain, save
from recipes.paper.page import percent

CANDIDATES = (Candidate("1f1b", 1), Candidate("hanayo", 2), Candidate("hanayo-zb", 2), Candidate("torch-1f1b", 1))
BASE, PEER = CANDIDATES[0].label, CANDIDATES[-1].label
CONTEXT, HEADS, RANKS = 128, 4, 2
REPEATS, WARM_UP, PINGS = 10, 2, 50
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class RealCase:
    """Sizes: `blocks` per rank of `width` features, and micro-batches of `samples` sequences."""

    num_microbatches: int
    width: int
    blocks: int
    samples: int
    num_rounds: int

    def schedule(self, candidate: Candidate) -> Schedule:
        """The schedule of a candidate."""
        return build(candidate.schedule_name, num_ranks=RANKS, num_microbatches=self.num_microbatches,
                     num_waves=candidate.waves)  # fmt: skip


@dataclass
class RealRecord:
    """One rank's times in seconds. The first four are for its whole share of one micro-batch; then one message."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    backward: float = 0.0
    message: float = 0.0
    rounds: dict[Candidate, list[RoundTiming]] = field(default_factory=dict)
    losses: dict[Candidate, float] = field(default_factory=dict)
    """of the last step, on the rank with the last stage"""


class RealStack(Stack):
    """Blocks of the GPT recipe."""

    def __init__(self, case: RealCase) -> None:
        self._case, self.num_blocks = case, case.blocks * RANKS
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(case.num_microbatches * case.samples, CONTEXT, case.width, generator=generator)
        self.inputs = whole.split(case.samples)

    @override
    def blocks(self, stage: int, num_stages: int) -> list[nn.Module]:
        per_stage = self.num_blocks // num_stages
        return [self.block(stage * per_stage + place) for place in range(per_stage)]

    def block(self, number: int) -> nn.Module:
        """Block `number` of the stack, with the same initial values on every rank."""
        with torch.random.fork_rng():
            torch.manual_seed(number)
            return Block(self._case.width, HEADS, 0.0)

    @override
    def defer(self, blocks: Sequence[nn.Module], queue: WeightGradientQueue) -> None:
        split_backward.patch_linear_layers(blocks, queue)


def work(rank: int, cases: list[RealCase]) -> list[RealRecord]:
    """Run all cases, one after the other."""
    return [_case(case) for case in cases]


def _case(case: RealCase) -> RealRecord:
    record, stack = RealRecord(), RealStack(case)
    _profile(case, stack, record)
    runners: dict[Candidate, Runner] = {}
    for one in CANDIDATES:
        schedule = case.schedule(one)
        runners[one] = (
            TorchRunner(schedule, stack, TORCHS[one.name]) if one.runtime == "torch" else OurRunner(schedule, stack)
        )
    record.rounds = in_rounds(runners, case.num_rounds)
    record.losses = {one: sum(runner.losses) for one, runner in runners.items() if runner.losses}
    return record


def _profile(case: RealCase, stack: RealStack, record: RealRecord) -> None:
    """Time this rank's blocks one by one: forward, backward, and split backward; all ranks at the same time."""
    queue = WeightGradientQueue()
    blocks = [stack.block(place) for place in range(case.blocks)]
    stack.defer(blocks, queue)
    stages = [SelfContainedFirstStage(blocks=[block], queue=queue, num_blocks=1) for block in blocks]
    x = stack.inputs[0].clone().requires_grad_()
    taken: dict[str, list[float]] = {what: [] for what in ("forward", "backward", "backward_input", "backward_weight")}
    dist.barrier()
    for turn in range(2 * (REPEATS + WARM_UP)):
        split = bool(turn % 2)
        times = dict.fromkeys(taken, 0.0)
        for stage in stages:
            _time_stage(stage, x, split, times)
        if turn >= 2 * WARM_UP:
            for what in ("forward", "backward_input", "backward_weight") if split else ("backward",):
                taken[what].append(times[what])
    for what, values in taken.items():
        setattr(record, what, median(values))
    record.message = message_time(x.detach(), PINGS)


def _time_stage(stage: SelfContainedFirstStage, x: Tensor, split: bool, times: dict[str, float]) -> None:
    clock = time.perf_counter
    batch = Batch(inputs=[x])
    start = clock()
    stage.forward(batch, 0, None)
    forward = clock()
    arrived = gradient_message([torch.full_like(x, 1e-3)])
    begin = clock()
    if split:
        stage.backward_input(batch, 0, arrived)
        middle = clock()
        stage.backward_weight(batch, 0, None)
        times["backward_input"] += middle - begin
        times["backward_weight"] += clock() - middle
    else:
        stage.backward(batch, 0, arrived)
        times["backward"] += clock() - begin
    times["forward"] += forward - start


@dataclass(frozen=True)
class RealResult:
    """One candidate with one number of micro-batches. A gain of 0.1 is 10 % less time than our 1f1b."""

    name: str
    num_microbatches: int
    step: Summary
    gain: Summary
    """compared within each round"""
    predicted_step: float
    predicted_gain: float
    cpu: float
    """seconds of a core per rank and step"""
    max_error: float
    """of the loss, relative to our 1f1b's"""


@dataclass(frozen=True)
class RealOutcome:
    """The results of all candidates, and the measured times from which they were predicted."""

    priority: str
    costs: CostModel
    """measured seconds for a rank's whole share, with the backward split"""
    whole_backward: float
    """measured seconds of the backward in one piece"""
    results: tuple[RealResult, ...]
    num_rounds: int


def measure(microbatches: Sequence[int], width: int, blocks: int, samples: int, rounds: int) -> RealOutcome:
    """Measure all candidates.

    Raises:
        HanayoError: there are fewer than two cores, or the blocks don't divide.
    """
    mine = cores()
    if len(mine) < RANKS:
        raise HanayoError(f"--real needs {RANKS} cores, a core for each rank; this process may use {len(mine)}")
    if blocks % 4:
        raise HanayoError(f"--blocks {blocks}: two waves have 4 stages per rank; expected a multiple of 4")
    cases = [RealCase(count, width, blocks, samples, rounds) for count in microbatches]
    options = [
        ProcessOptions(realtime=False, core=core) for core in mine[:RANKS]
    ]  # gloo's thread shares the rank's core
    found = run_ranks(work, cases, options, TIMEOUT_S)
    ranks: list[list[RealRecord]] = [records for _, records in found]
    costs, whole = _costs([records[0] for records in ranks])
    results = [
        result
        for place, case in enumerate(cases)
        for result in _results(case, [records[place] for records in ranks], costs, whole)
    ]
    return RealOutcome(f"{found[0][0]}, a core for each rank", costs, whole, tuple(results), rounds)


def _costs(records: Sequence[RealRecord]) -> tuple[CostModel, float]:
    """Average over the ranks, which hold equal blocks."""

    def mean(what: str) -> float:
        return fmean(float(getattr(record, what)) for record in records)

    forward, inputs, weights = mean("forward"), mean("backward_input"), mean("backward_weight")
    return CostModel(forward, inputs, weights, message=mean("message")), mean("backward")


def _results(case: RealCase, ranks: Sequence[RealRecord], costs: CostModel, whole: float) -> list[RealResult]:
    turns = {one: list(zip(*(record.rounds[one] for record in ranks), strict=True)) for one in CANDIDATES}
    steps = {one: [step_time(turn) for turn in turns[one]] for one in CANDIDATES}
    predicted = {one: _predict(case.schedule(one), costs, whole) for one in CANDIDATES}
    losses = {one: next(record.losses[one] for record in ranks if one in record.losses) for one in CANDIDATES}
    base = CANDIDATES[0]
    return [
        RealResult(
            one.label,
            case.num_microbatches,
            Summary.of(steps[one]),
            Summary.of([1 - mine / theirs for mine, theirs in zip(steps[one], steps[base], strict=True)]),
            predicted[one],
            1 - predicted[one] / predicted[base],
            median(fmean(timing.cpu for timing in turn) for turn in turns[one]),
            abs(losses[one] / losses[base] - 1),
        )
        for one in CANDIDATES
    ]


def _predict(schedule: Schedule, costs: CostModel, whole: float) -> float:
    """The simulated step, with the time measured for the schedule's form of the backward."""
    split = any(action.kind == "W" for row in schedule.actions for action in row)
    model = costs if split else CostModel(costs.forward, whole / 2, whole / 2, message=costs.message)
    return simulate(schedule, model).makespan


def findings(outcome: RealOutcome, machine: Sequence[str]) -> Findings:
    """Returns what the command prints and writes."""
    costs: Any = outcome.costs
    about = (
        f"A rank's share of one micro-batch alone: F {ms(costs.forward)}, I {ms(costs.backward_input)}, W "
        f"{ms(costs.backward_weight)} ms, the backward in one piece {ms(outcome.whole_backward)} ms; a message "
        f"{ms(costs.message, 2)} ms. {outcome.num_rounds} rounds. Gains are over our 1f1b of the same round."
    )
    text = page("# A pipeline with real computation", machine, about, table(COLUMNS, outcome.results))
    return Findings(text, {"machine": machine, "real": outcome}, {"picture": lambda path: draw(outcome, path)})


def _reached(result: RealResult) -> str:
    """The part of the predicted gain that was reached."""
    return percent(result.gain.median / result.predicted_gain, 0) if result.predicted_gain > 1e-9 else "-"


COLUMNS: Columns = (
    ("schedule", lambda one: one.name),
    ("B", lambda one: str(one.num_microbatches)),
    ("step ms", lambda one: ms(one.step.median)),
    ("min-max", lambda one: span(one.step)),
    ("predicted ms", lambda one: ms(one.predicted_step)),
    ("gain", lambda one: percent(one.gain.median)),
    ("min-max", lambda one: f"{percent(one.gain.least)} to {percent(one.gain.most)}"),
    ("predicted gain", lambda one: "-" if one.name in (BASE, PEER) else percent(one.predicted_gain)),
    ("reached", _reached),
    ("CPU ms", lambda one: ms(one.cpu, 0)),
)


def draw(outcome: RealOutcome, path: Path) -> None:
    """Draw bars: gains over 1f1b, measured and predicted."""
    shown = [result for result in outcome.results if result.name != BASE]
    figure = new(2 + 0.9 * len(shown), 3.4)
    axes = figure.subplots()
    plain(axes, "Gain over 1f1b, two ranks, real computation", y="%")
    for place, result in enumerate(shown):
        colour = GREY if result.name == PEER else BLUE
        axes.bar(place - 0.2, 100 * result.gain.median, width=0.4, color=colour)
        axes.vlines(place - 0.2, 100 * result.gain.least, 100 * result.gain.most, color="black", linewidth=1)
        axes.bar(place + 0.2, 100 * result.predicted_gain, width=0.4, color=ORANGE)
    axes.set_xticks(range(len(shown)), [f"{r.name}\nB={r.num_microbatches}" for r in shown], fontsize=7)
    axes.text(1.0, 1.0, "orange: predicted", transform=axes.transAxes, ha="right", va="top", fontsize=8)
    save(figure, path)

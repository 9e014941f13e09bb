"""Runs one rank of the benchmark with real computation: times its blocks, then runs all candidates in turn."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.pipeline_parallel import split_backward
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.message import gradient_message
from lightning_hanayo.pipeline_parallel.p2p import PointToPointChannel
from lightning_hanayo.pipeline_parallel.profiling.trace import Trace
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import Stage
from lightning_hanayo.schedule import Schedule, build
from recipes.benchmarks.ours import build_stage, world_transport
from recipes.benchmarks.self_contained import SelfContainedFirstStage

PEER = "torch 1f1b"
CANDIDATES = ("1f1b", "hanayo W=2", "hanayo-zb W=2", PEER)
CONTEXT, HEADS, RANKS = 128, 4, 2
REPEATS, WARM_UP, PINGS = 10, 2, 50


@dataclass(frozen=True)
class RealCase:
    """Sizes: `blocks` per rank of `width` features, and micro-batches of `samples` sequences."""

    num_microbatches: int
    width: int
    blocks: int
    samples: int
    num_rounds: int


@dataclass
class RealRecord:
    """One rank's times in seconds. The first four are for its whole share of one micro-batch; then one message."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    backward: float = 0.0
    message: float = 0.0
    starts: dict[str, list[float]] = field(default_factory=dict)
    ends: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    """of the last step, on the rank with the last stage"""


def schedule_of(name: str, case: RealCase) -> Schedule:
    """The schedule of a candidate."""
    kind, _, waves = name.removeprefix("torch ").partition(" W=")
    return build(kind, num_ranks=RANKS, num_microbatches=case.num_microbatches, num_waves=int(waves or 1))


def work(rank: int, cases: list[RealCase]) -> list[RealRecord]:
    """Run all cases, one after the other."""
    return [_case(case) for case in cases]


def _case(case: RealCase) -> RealRecord:
    record = RealRecord()
    _profile(case, record)
    runners = {name: _peer(case) if name == PEER else _ours(case, name) for name in CANDIDATES}
    for turn in range(-WARM_UP, case.num_rounds):
        first = turn % len(CANDIDATES)
        for name in CANDIDATES[first:] + CANDIDATES[:first]:
            module, run_step, loss = runners[name]
            module.zero_grad()
            dist.barrier()
            cpu, start = time.process_time(), time.monotonic()
            run_step()
            end = time.monotonic()
            if turn >= 0:
                record.starts.setdefault(name, []).append(start)
                record.ends.setdefault(name, []).append(end)
                record.cpu.setdefault(name, []).append(time.process_time() - cpu)
            if (value := loss()) is not None:
                record.losses[name] = value
    return record


class _WithLoss(nn.Module):
    """The last block and a loss."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return _loss(self.block(x))


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def _block(case: RealCase, number: int) -> nn.Module:
    """Block `number` of the stack, with the same initial values on every rank."""
    from recipes.gpt.module import Block

    with torch.random.fork_rng():
        torch.manual_seed(number)
        return Block(case.width, HEADS, 0.0)


def _batch(case: RealCase) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(case.num_microbatches * case.samples, CONTEXT, case.width, generator=generator)
    return list(whole.split(case.samples))


_Runner = tuple[nn.Module, Callable[[], None], Callable[[], float | None]]


def _ours(case: RealCase, name: str) -> _Runner:
    schedule, rank = schedule_of(name, case), dist.get_rank()
    per_stage = case.blocks * RANKS // schedule.num_stages
    runs: dict[int, Stage] = {}
    everything = nn.ModuleList()
    for number in schedule.stages_of(rank):
        blocks = [_block(case, number * per_stage + place) for place in range(per_stage)]
        is_last = number == schedule.num_stages - 1
        everything.extend(blocks)
        queue = WeightGradientQueue()
        split_backward.patch_linear_layers(blocks, queue)
        whole = [*blocks[:-1], _WithLoss(blocks[-1])] if is_last else blocks
        runs[number] = build_stage(whole, number, schedule, queue, num_blocks=case.blocks * RANKS)
    batch = Batch(inputs=_batch(case), loss_weights=[1 / case.num_microbatches] * case.num_microbatches)
    engine, program = (
        Engine(runs, PointToPointChannel(world_transport()), lambda _: None, Trace()),
        Program.from_schedule(schedule, rank),
    )

    def loss() -> float | None:
        return sum(value.item() for value in batch.results.values()) if batch.results else None

    return everything, lambda: engine.run(program, batch), loss


def _peer(case: RealCase) -> _Runner:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    module = nn.Sequential(*(_block(case, rank * case.blocks + place) for place in range(case.blocks)))
    entering = torch.empty(case.samples, CONTEXT, case.width, requires_grad=rank > 0)
    leaving = torch.empty(case.samples, CONTEXT, case.width, requires_grad=True)
    cpu = torch.device("cpu")
    stage = PipelineStage(module, rank, RANKS, cpu, input_args=(entering,), output_args=(leaving,))

    def scaled(output: Tensor, target: Tensor) -> Tensor:
        return _loss(output) / case.num_microbatches

    runtime = Schedule1F1B(stage, case.num_microbatches, loss_fn=scaled, scale_grads=False)
    arguments: Any = (torch.cat(_batch(case)),) if rank == 0 else ()
    last = rank == RANKS - 1
    target = torch.zeros(case.num_microbatches, 1) if last else None
    losses: list[Tensor] = []

    def run_step() -> None:
        runtime.step(*arguments, target=target, losses=losses if last else None, return_outputs=False)

    def loss() -> float | None:
        return sum(one.item() for one in losses) * case.num_microbatches if losses else None

    return module, run_step, loss


def _profile(case: RealCase, record: RealRecord) -> None:
    """Time this rank's blocks one by one: forward, backward, and split backward; all ranks at the same time."""
    queue = WeightGradientQueue()
    blocks = [_block(case, place) for place in range(case.blocks)]
    split_backward.patch_linear_layers(blocks, queue)
    stages = [SelfContainedFirstStage(blocks=[block], queue=queue, num_blocks=1) for block in blocks]
    x = _batch(case)[0].requires_grad_()
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
    record.message = _message_time(x.detach())


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


def _message_time(message: Tensor) -> float:
    """Seconds that a message takes to another rank: half a round trip."""
    here, buffer = dist.get_rank(), torch.empty_like(message)
    taken = []
    for _ in range(PINGS):
        start = time.perf_counter()
        if here == 0:
            dist.send(message, 1)
            dist.recv(buffer, 1)
        else:
            dist.recv(buffer, 0)
            dist.send(message, 0)
        taken.append((time.perf_counter() - start) / 2)
    return median(taken)

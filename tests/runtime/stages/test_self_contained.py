"""A stack that computes its own loss: on the last rank in a loop, and with two copies at once in chimera.

chimera, P = 2      down    0 -> 1      rank 0 has stages 0 and 3, rank 1 stages 1 and 2;
                    up      3 <- 2      0 and 2, 1 and 3 have the same weights and sum their gradients
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hanayo.runtime.autograd import linear_patch
from lightning_hanayo.runtime.autograd.gradient_all_reduce import GradientAllReduce
from lightning_hanayo.runtime.autograd.weight_gradient_queue import WeightGradientQueue
from lightning_hanayo.runtime.batch import Batch
from lightning_hanayo.runtime.comm.point_to_point import PointToPointChannel
from lightning_hanayo.runtime.comm.process_group_transport import ProcessGroupTransport
from lightning_hanayo.runtime.comm.transport import Transport
from lightning_hanayo.runtime.engine import Engine
from lightning_hanayo.runtime.profiling.trace import Trace
from lightning_hanayo.runtime.program import Program
from lightning_hanayo.runtime.stages.base import MiddleStage, Stage
from lightning_hanayo.runtime.stages.self_contained import SelfContainedFirstStage, SelfContainedLastStage
from lightning_hanayo.schedule import Schedule, build, forward_only
from tests.harness.limits import real_seconds
from tests.harness.loopback import Hub
from tests.harness.pool import Pool
from tests.runtime.loopback_pipeline import run_in_threads
from tests.schedule.samples import split

Pair = tuple[Tensor, Tensor]
WIDTH = 6


class Block(nn.Module):
    """Passes the targets on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Pair) -> Pair:
        x, targets = state
        return x + torch.tanh(self.linear(x)), targets


class Loss(Block):
    def forward(self, state: Pair) -> Tensor:  # type: ignore[override]
        x, targets = super().forward(state)
        return nn.functional.cross_entropy(x, targets)


def stack(num_blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(num_blocks - 1)), Loss()).double()


def batch(num_microbatches: int) -> list[Pair]:
    """Micro-batches without a share are NaN."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_microbatches, 3, WIDTH, generator=generator, dtype=torch.float64)
    inputs[[not share for share in shares(num_microbatches)]] = torch.nan
    return list(zip(inputs, torch.randint(0, WIDTH, (num_microbatches, 3), generator=generator), strict=True))


def shares(num_microbatches: int) -> list[float]:
    """Uneven; the third one has none."""
    return [((m + 1) % 3) / num_microbatches for m in range(num_microbatches)]


def expected(num_microbatches: int) -> list[Tensor]:
    """The gradients of one process."""
    model = stack()
    for pair, share in zip(batch(num_microbatches), shares(num_microbatches), strict=True):
        if share:
            (model(pair) * share).backward()
    return [_not_none(parameter.grad) for parameter in model.parameters()]


def _not_none(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    return gradient


class PipelineRank:
    """One rank: its own weights, an engine over its stages."""

    def __init__(self, schedule: Schedule, transport: Transport, reduce: Callable[[int], None]) -> None:
        self.schedule, self.rank = schedule, transport.rank
        per_stage = 4 // schedule.stages_per_replica
        self.blocks = {
            stage: list(stack())[stage % schedule.stages_per_replica * per_stage :][:per_stage]
            for stage in schedule.stages_of(self.rank)
        }
        self.stages = {stage: self._stage(stage, blocks) for stage, blocks in self.blocks.items()}
        self.losses: dict[int, Tensor] = {}
        self.engine = Engine(self.stages, PointToPointChannel(transport), reduce, Trace())

    def _stage(self, stage: int, blocks: list[nn.Module]) -> Stage:
        queue = WeightGradientQueue()
        linear_patch.patch_linear_layers(blocks, queue)
        place = stage % self.schedule.stages_per_replica
        if place == 0:
            return SelfContainedFirstStage(blocks=blocks, queue=queue, num_blocks=4)
        is_last = place == self.schedule.stages_per_replica - 1
        return (SelfContainedLastStage if is_last else MiddleStage)(blocks=blocks, queue=queue)

    @property
    def parameters(self) -> dict[int, list[nn.Parameter]]:
        return {stage: [p for block in own for p in block.parameters()] for stage, own in self.blocks.items()}

    def run(self, schedule: Schedule) -> None:
        count = schedule.num_microbatches
        running = Batch(inputs=batch(count), loss_weights=shares(count), results=self.losses)
        self.engine.begin_batch()
        self.engine.run(Program.from_schedule(schedule, self.rank), running)
        self.engine.end_batch()


def run_all(runners: list[PipelineRank], schedule: Schedule) -> None:
    run_in_threads([partial(runner.run, schedule) for runner in runners])


def check(gradients: Mapping[int, Sequence[Tensor | None]], schedule: Schedule) -> None:
    """Summed over copies, the stages' gradients are those of one process."""
    length, num_replicas = schedule.stages_per_replica, schedule.num_replicas
    replicas = [[g for place in range(length) for g in gradients[r * length + place]] for r in range(num_replicas)]
    for copies, theirs in zip(zip(*replicas, strict=True), expected(schedule.num_microbatches), strict=True):
        ours = sum((gradient for gradient in copies if gradient is not None), torch.zeros_like(theirs))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


CASES = [
    build("1f1b", num_ranks=2, num_microbatches=3),
    build("interleaved", num_ranks=2, num_microbatches=4),
    build("zbv", num_ranks=2, num_microbatches=4),
    *(build("chimera", num_ranks=2, num_microbatches=count) for count in (1, 2, 5)),
    *(build("chimera", num_ranks=4, num_microbatches=count) for count in (1, 4, 6, 8)),
    split(build("chimera", num_ranks=4, num_microbatches=8)),
]


def named(schedule: Schedule) -> str:
    return f"{schedule.name}-{schedule.num_ranks}-{schedule.num_microbatches}"


def runners_of(schedule: Schedule, reduce: Callable[[int], None]) -> list[PipelineRank]:
    hub = Hub(schedule.num_ranks, timeout=real_seconds(30))
    return [PipelineRank(schedule, transport, reduce) for transport in hub.transports()]


@pytest.mark.parametrize("schedule", CASES, ids=named)
def test_gradients_are_those_of_one_process(schedule: Schedule) -> None:
    reduced: list[int] = []
    runners = runners_of(schedule, reduced.append)
    for _ in range(2):
        for parameter in (p for runner in runners for own in runner.parameters.values() for p in own):
            parameter.grad = None
        run_all(runners, schedule)
        check({s: [p.grad for p in own] for runner in runners for s, own in runner.parameters.items()}, schedule)
    assert sorted(reduced) == sorted(2 * [*range(schedule.num_stages)])


def test_losses_are_on_the_ranks_with_the_last_stages() -> None:
    schedule = build("chimera", num_ranks=4, num_microbatches=6)
    runners = runners_of(schedule, lambda stage: None)
    run_all(runners, forward_only(schedule))
    assert [sorted(runner.losses) for runner in runners] == [[2, 3, 5], [], [], [0, 1, 4]]
    losses = runners[0].losses | runners[3].losses
    for m, pair in enumerate(batch(6)):
        torch.testing.assert_close(losses[m], stack()(pair).detach(), rtol=0, atol=1e-12, equal_nan=True)


def over_processes(num_microbatches: int) -> dict[int, list[Tensor | None]]:
    """Run chimera on this rank; return its stages' gradients, summed with their copies'."""
    dist.init_process_group("gloo")
    world, rank, last = dist.group.WORLD, dist.get_rank(), dist.get_world_size() - 1
    assert world is not None
    pairs = [dist.new_group([low, last - low]) for low in range(dist.get_world_size() // 2)]
    transport = ProcessGroupTransport(
        range(last + 1), control=world, channels={}, device=torch.device("cpu"), on_failure=raised
    )
    schedule = build("chimera", num_ranks=last + 1, num_microbatches=num_microbatches)
    reductions: list[GradientAllReduce] = []
    runner = PipelineRank(schedule, transport, lambda stage: reductions[0].start(stage))
    reductions.append(GradientAllReduce(runner.parameters, pairs[min(rank, last - rank)]))
    runner.run(schedule)
    reductions[0].finish()
    runner.engine.channel.finish()  # a peer may still need what this rank has sent
    return {stage: [parameter.grad for parameter in own] for stage, own in runner.parameters.items()}


def raised(error: Exception) -> NoReturn:
    raise error


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 1), (2, 4), (4, 6)])
def test_copies_of_a_stage_sum_gradients_over_processes(pool: Pool, num_ranks: int, num_microbatches: int) -> None:
    schedule = build("chimera", num_ranks=num_ranks, num_microbatches=num_microbatches)
    found = pool.run(num_ranks, over_processes, num_microbatches)
    gradients = {stage: own for rank in found for stage, own in rank.items()}
    for stage, copy in enumerate(schedule.replica_of):
        for ours, theirs in zip(gradients[stage], gradients[copy], strict=True):
            assert torch.equal(ours, theirs)
    half = schedule.stages_per_replica
    check({stage: own if stage < half else [None] * len(own) for stage, own in gradients.items()}, schedule)

"""A stack that computes its own loss, on whatever rank has its last stage."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.pipeline_parallel import split_backward
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.p2p import PointToPointChannel
from lightning_hanayo.pipeline_parallel.profiling.trace import Trace
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.stages import MiddleStage, Stage
from lightning_hanayo.pipeline_parallel.transport import Transport
from lightning_hanayo.schedule import Schedule, build, forward_only
from recipes.benchmarks.self_contained import SelfContainedFirstStage, SelfContainedLastStage
from tests.harness.limits import real_seconds
from tests.harness.loopback import Hub
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
        per_stage = 4 // schedule.num_stages
        self.blocks = {stage: list(stack())[stage * per_stage :][:per_stage] for stage in schedule.stages_of(self.rank)}
        self.stages = {stage: self._stage(stage, blocks) for stage, blocks in self.blocks.items()}
        self.losses: dict[int, Tensor] = {}
        self.engine = Engine(self.stages, PointToPointChannel(transport), reduce, Trace())

    def _stage(self, stage: int, blocks: list[nn.Module]) -> Stage:
        queue = WeightGradientQueue()
        split_backward.patch_linear_layers(blocks, queue)
        if stage == 0:
            return SelfContainedFirstStage(blocks=blocks, queue=queue, num_blocks=4)
        is_last = stage == self.schedule.num_stages - 1
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
    """The stages' gradients are those of one process."""
    ours = [gradient for stage in range(schedule.num_stages) for gradient in gradients[stage]]
    for own, theirs in zip(ours, expected(schedule.num_microbatches), strict=True):
        torch.testing.assert_close(own, theirs, rtol=0, atol=1e-10)


CASES = [
    build("1f1b", num_ranks=2, num_microbatches=3),
    build("interleaved", num_ranks=2, num_microbatches=4),
    build("zbv", num_ranks=2, num_microbatches=4),
    split(build("hanayo", num_ranks=2, num_microbatches=5)),
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


def test_losses_are_on_the_rank_with_the_last_stage() -> None:
    schedule = build("1f1b", num_ranks=4, num_microbatches=6)
    runners = runners_of(schedule, lambda stage: None)
    run_all(runners, forward_only(schedule))
    assert [sorted(runner.losses) for runner in runners] == [[], [], [], [0, 1, 2, 3, 4, 5]]
    for m, pair in enumerate(batch(6)):
        torch.testing.assert_close(runners[3].losses[m], stack()(pair).detach(), rtol=0, atol=1e-12, equal_nan=True)

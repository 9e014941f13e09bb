"""The engine runs pairs of actions: the same gradients, own spans in the trace, and states that belong to an action."""

from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.overlap.link_queue import LinkQueue
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.engine import Engine, Pair, Program
from lightning_hanayo.pipeline_parallel.rng import RandomStreams
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.trace import Event, Trace, stage_times
from lightning_hanayo.schedule import Action, Kind
from recipes.benchmarks.pairs.tables import ALONE, STEADY, table_of
from recipes.benchmarks.self_contained import SelfContainedSingleStage

COUNT = 4


class Transfer:
    """A collective of one rank: it is done at once."""

    def wait(self) -> None:
        """Nothing is under way."""


class Gather(torch.autograd.Function):
    """Waits for a collective in both directions, so that pairs change hands there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, queue: LinkQueue) -> Tensor:
        ctx.queue = queue
        queue.start(Transfer).wait()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.queue.start(Transfer).wait()
        return gradient, None


class Block(nn.Module):
    def __init__(self, queue: LinkQueue, streams: RandomStreams, index: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8, dtype=torch.float64), nn.Dropout(0.3)
        self.queue, self.streams, self.index = queue, streams, index

    def forward(self, x: Tensor) -> Tensor:
        self.streams.begin_block(self.index)
        x = x + self.dropout(torch.tanh(self.linear(Gather.apply(x, self.queue))))
        return x + self.dropout(Gather.apply(x, self.queue))


class Loss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class NoChannel:
    """One rank sends no messages."""

    def begin_batch(self, signature: int) -> None:
        """Called by the engine."""


def run(way: str, batches: int = 1, paired: bool = True) -> tuple[list[Tensor], list[Tensor], Engine]:
    """The losses and gradients of the last batch."""
    torch.manual_seed(0)
    queue, weights = LinkQueue(), WeightGradientQueue()
    streams = RandomStreams(7, 0, torch.device("cpu"))
    blocks = [Block(queue, streams, 0), Block(queue, streams, 1), Loss()]
    stage = SelfContainedSingleStage(blocks=blocks, queue=weights, num_blocks=len(blocks))
    queue.turns.states = [weights, streams]
    channel: Any = NoChannel()
    engine = Engine({0: stage}, channel, refuse, Trace(), streams=streams, turns=queue.turns if paired else None)
    program = Program.from_schedule(table_of(way, COUNT), 0)
    for _ in range(batches):
        for block in blocks:
            block.zero_grad()
        inputs = [torch.full((2, 8), m + 1.0, dtype=torch.float64, requires_grad=True) for m in range(COUNT)]
        batch = Batch(inputs=inputs, loss_weights=[1 / COUNT] * COUNT, reduce_gradients=False)
        engine.begin_batch()
        with streams.batch("always the same"):
            engine.run(program, batch)
        engine.end_batch()
    queue.close()
    gradients = [
        parameter.grad.clone() for block in blocks for parameter in block.parameters() if parameter.grad is not None
    ]
    return [batch.results[m] for m in range(COUNT)], gradients, engine


def refuse(stage: int) -> NoReturn:
    raise AssertionError(f"stage {stage} has no data ranks")


@pytest.mark.parametrize("batches", [1, 2])
def test_pairs_make_the_same_gradients(batches: int) -> None:
    """With random numbers of each micro-batch's own."""
    losses, gradients, _ = run(ALONE, paired=False)
    found_losses, found, _ = run(STEADY, batches)
    assert all(torch.equal(one, other) for one, other in zip(found_losses, losses, strict=True))
    torch.testing.assert_close(found, gradients, rtol=0, atol=0)


def test_a_pairs_actions_overlap_in_the_trace() -> None:
    _, _, engine = run(STEADY)
    (events,) = engine.trace.batches
    row = table_of(STEADY, COUNT)
    assert [event.action for event in events] == list(row.actions[0])
    spans = {event.action: event for event in events}
    for first, second in row.pairs:
        one, other = spans[first], spans[second]
        assert max(one.start, other.start) < min(one.end, other.end)


def test_without_pairs_their_actions_run_one_after_the_other() -> None:
    _, _, engine = run(STEADY, paired=False)
    (events,) = engine.trace.batches
    assert all(one.end <= other.start for one, other in zip(events, events[1:], strict=False))


def test_a_program_has_pairs_as_steps() -> None:
    program = Program.from_schedule(table_of(STEADY, COUNT), 0)
    assert sum(isinstance(step, Pair) for step in program.steps) == COUNT - 1


def test_stage_times_count_what_ran_alone() -> None:
    row = [Action.parse(cell) for cell in ("0F0", "0F1", "0B0", "0B1")]
    times = [(0.0, 1.0), (1.0, 4.0), (1.0, 4.0), (4.0, 6.0)]
    events = [Event(action, start, start, end) for action, (start, end) in zip(row, times, strict=True)]
    assert stage_times([[events]], in_pairs=row[1:3]) == {(0, Kind.F): 1.0, (0, Kind.B): 2.0}
    assert stage_times([[events[1:3]]], in_pairs=row[1:3]) == {(0, Kind.F): 3.0, (0, Kind.B): 3.0}

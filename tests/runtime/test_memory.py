"""The memory of a rank during a batch: the schedule's peak, and nothing that waits for the garbage collector.

bytes of rank 1 after each action, counted tensor by tensor   <=   1.05 x the simulated peak, messages on their way
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_hanayo.pipeline_parallel.p2p import MAX_SPARE_BUFFERS
from lightning_hanayo.pipeline_parallel.trace import Trace
from lightning_hanayo.schedule import Action, Schedule, build, simulate
from tests.harness.live_bytes import Live
from tests.harness.thorough import covered
from tests.runtime.loopback_pipeline import LoopbackPipeline
from tests.schedule.samples import split

WIDTH, LENGTH, SIZE, MICROBATCHES = 32, 16, 4, 8


class Block(nn.Module):
    """A transformer block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.first(x)).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def step(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), tokens.flatten())


class Watch(Trace):
    """Records the bytes after each action."""

    def __init__(self, live: Live) -> None:
        super().__init__()
        self.live = live
        self.held: list[int] = []

    def add(self, action: Action, reached: float, start: float, end: float) -> None:
        self.held.append(self.live.num_bytes)
        super().add(action, reached, start, end)


@contextmanager
def running(schedule: Schedule) -> Iterator[Any]:
    """The pipeline, and a function that runs a batch without the garbage collector."""
    torch.manual_seed(0)
    model = Model()
    batch = torch.randint(0, 11, (MICROBATCHES, SIZE, LENGTH)).unbind()
    pipeline = LoopbackPipeline(model.blocks, schedule)
    gc.collect()
    gc.disable()
    try:
        yield pipeline, lambda: pipeline.run(lambda m: model.step(batch[m]), [1 / MICROBATCHES] * MICROBATCHES)
    finally:
        gc.enable()
        pipeline.close()


TABLES = [
    build("hanayo", num_ranks=2, num_microbatches=MICROBATCHES),
    split(build("hanayo", num_ranks=2, num_microbatches=MICROBATCHES)),
    build("zbv", num_ranks=2, num_microbatches=MICROBATCHES),
    build("zb-h1", num_ranks=2, num_microbatches=MICROBATCHES),
    build("interleaved-zb", num_ranks=2, num_microbatches=MICROBATCHES),
]


@pytest.mark.parametrize("schedule", TABLES, ids=lambda schedule: schedule.name)
def test_peak_bytes_are_the_simulated_peak(schedule: Schedule) -> None:
    """On rank 1, whose stages run in its own thread. A message is 1/64 of a stage's activations of a micro-batch."""
    live = Live()
    with running(schedule) as (pipeline, run):
        engine = pipeline.engines[1]
        engine.trace = watch = Watch(live)
        run_program = engine.run

        def counted(*args: Any, **kwargs: Any) -> None:
            with live:
                run_program(*args, **kwargs)

        engine.run = counted
        run()  # makes the gradients, which stay
        before, watch.held = live.num_bytes, []
        run()
        message = SIZE * LENGTH * WIDTH * 4
        one = (watch.held[0] - before) * (len(pipeline.schedule.stages_of(1)))  # M_a, after the first forward
        peak = simulate(pipeline.schedule).peak_activations[1]
        assert one > 60 * message
        assert max(watch.held) - before <= 1.05 * peak * one
        assert (
            watch.held[-1] - before <= (5 + 2 * MAX_SPARE_BUFFERS) * message
        )  # spare buffers for activations and gradients


@pytest.mark.parametrize("schedule", covered(TABLES[:3], by=TABLES[1:2]), ids=lambda schedule: schedule.name)
def test_nothing_waits_for_the_garbage_collector(schedule: Schedule) -> None:
    with running(schedule) as (_, run):
        run()
        for _ in range(5):  # what an earlier test has left, compiled code say, needs several rounds
            gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            run()
            gc.collect()
            found = [tuple(thing.shape) for thing in gc.garbage if isinstance(thing, Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert found == []

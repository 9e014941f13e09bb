"""Steps with several passes through the stack have one process's gradients, with as few forwards ahead as possible.

one pass                  0F0 1F0 2F0 3F0 | the table without them          the first batch of an epoch
                          the table                                         from then on
no_grad, then gradients   0F0 1F0 ... of pass 0, for all | the table
gradients, then no_grad   forwards of both | backwards
"""

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.engine import Engine
from lightning_hanayo.pipeline_parallel.transport import Relay
from lightning_hanayo.schedule import Schedule, build
from lightning_hanayo.strategy.pipeline import Pipeline
from tests.runtime.loopback_pipeline import LoopbackPipeline, run_in_threads
from tests.runtime.test_engine import Block

NUM_MICROBATCHES = 4
WIDTH = 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stack(self.embedding(x)))

    def stack(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def step(self, x: Tensor) -> Tensor:
        return self(x).square().mean()

    @torch.no_grad()
    def reference(self, x: Tensor) -> Tensor:
        return self(x.flip(1))


class Before(Model):
    def step(self, x: Tensor) -> Tensor:
        target = self.reference(x)
        return (self(x) - target).square().mean()


class After(Model):
    def step(self, x: Tensor) -> Tensor:
        made = self(x)
        return (made - self.reference(x)).square().mean()


class Around(Model):
    def step(self, x: Tensor) -> Tensor:
        first, made = self.reference(x), self(x)
        return ((made - first) * self.reference(x + first)).square().mean()


class Pair(Model):
    def step(self, x: Tensor) -> Tensor:
        return (self(x) - self(x.flip(1)).exp()).square().mean()


class SharesEmbedding(Model):
    """Both passes begin with the same tensor, whose graph is needed twice."""

    def step(self, x: Tensor) -> Tensor:
        first = self.embedding(x)
        return (self.stack(first) * self.stack(first.exp())).square().mean()


class Chain(Model):
    """A pass on another one's output, which the loss uses, too; and then one without gradients."""

    def step(self, x: Tensor) -> Tensor:
        first = self.stack(self.embedding(x))
        second = self.stack(first + x)
        return (self.head(first + second) - self.reference(x)).square().mean()


class Frozen(Model):
    """No gradient reaches the stack; the embedding gets one past it."""

    def step(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            features = self.stack(self.embedding(x))
        return self.head(features + self.embedding(x)).square().mean()


class Running:
    """All ranks of a pipeline, as threads."""

    def __init__(self, model: Model, schedule: Schedule) -> None:
        self.model = model
        self.pipeline = LoopbackPipeline(model.blocks, schedule)
        self.ended: list[int] = []
        self.ran: list[list[str]] = []
        self.ranks = [self._rank(rank, engine) for rank, engine in enumerate(self.pipeline.engines)]

    def _rank(self, rank: int, engine: Engine) -> Pipeline:
        if rank == 0:
            run = engine.run
            engine.run = lambda program, *args, **options: self._count(  # type: ignore[method-assign]
                partial(run, program, *args, **options), program
            )
        return Pipeline(
            layout=Mock(table=lambda _: self.pipeline.schedule, runs_step_once=False),
            ownership=Mock(stages=self.pipeline.schedule.stage_ranks),
            rank=rank,
            engine=engine,
            relay=Relay(self.pipeline.transports[rank]),
            parameters=[],
            gradients=Mock(**{"stages.has_no_peers": False}),
            splitter=Mock(),
            stack_splitter=Mock(),
            gather_in_cube=lambda value: [value],
            step_state=Mock(
                watched=lambda *_, **__: nullcontext(), end_pass=self.ended.append if rank == 0 else lambda _: None
            ),
            user_step=self.pipeline.user if rank == 0 else None,
        )

    def _count(self, run: Any, program: Any) -> None:
        run()
        self.ran.append([str(step.action) for step in program.steps if hasattr(step, "action")])

    def train(self, inputs: list[Tensor], *, is_first: bool = False, reduces: bool = True) -> None:
        weights = [1 / NUM_MICROBATCHES] * NUM_MICROBATCHES
        step = lambda m: self.model.step(inputs[m])  # noqa: E731
        self._run(Batch(0, reduces, step=step, loss_weights=weights, num_microbatches=NUM_MICROBATCHES), is_first)

    def evaluate(self, step: Any) -> list[Any]:
        batch = Batch(1, step=step, num_microbatches=NUM_MICROBATCHES)
        self._run(batch, trains=False)
        return [batch.results[m] for m in range(NUM_MICROBATCHES)]

    def _run(self, batch: Batch, is_first: bool = False, *, trains: bool = True) -> None:
        def run(one: Pipeline) -> None:
            given = (batch, "batch") if one.rank == 0 else ()
            with nullcontext() if trains else torch.no_grad():
                one.run(*given, trains=trains, reduce=batch.reduce_gradients, is_first=is_first)

        run_in_threads([partial(run, one) for one in self.ranks])


@contextmanager
def pipeline(kind: type[Model], name: str = "hanayo", num_ranks: int = 2) -> Iterator[Running]:
    torch.manual_seed(0)
    waves = {"num_waves": 2 // num_ranks} if name == "hanayo" else {}
    running = Running(kind().double(), build(name, num_ranks=num_ranks, num_microbatches=NUM_MICROBATCHES, **waves))
    try:
        yield running
    finally:
        running.pipeline.close()


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, WIDTH, generator=generator, dtype=torch.float64) for _ in range(NUM_MICROBATCHES)]


@pytest.mark.parametrize("name", ["hanayo", "1f1b", "zbv"])
@pytest.mark.parametrize("kind", [Model, Before, After, Around, Pair, SharesEmbedding, Chain, Frozen])
def test_gradients_equal_those_of_one_process(kind: type[Model], name: str) -> None:
    with pipeline(kind, name) as running, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the step makes")
        reference = copy.deepcopy(running.model)
        for _ in range(2):
            running.train(inputs())
            for x in inputs():
                (reference.step(x) / NUM_MICROBATCHES).backward()
    for ours, theirs in zip(running.model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None and theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)
    assert sorted(running.pipeline.reduced) == sorted([*range(running.pipeline.schedule.num_stages)] * 2)


def test_only_micro_batch_0_of_the_first_batch_runs_ahead() -> None:
    with pipeline(Model) as running:
        for _ in range(2):
            running.train(inputs())
    table = [str(action) for action in running.pipeline.schedule.actions[0]]
    assert running.ran == [["0F0", "3F0"], [cell for cell in table if cell not in ("0F0", "3F0")], table]
    assert [len(engine.trace.batches) for engine in running.pipeline.engines] == [1, 1], "only the whole table"


def test_passes_without_gradients_come_before_the_whole_table() -> None:
    with pipeline(Before) as running:
        running.train(inputs())
        del running.ran[:]
        running.train(inputs())
    first, second = running.ran
    assert {cell[1] for cell in first} == {"F"}
    assert second == [str(action) for action in running.pipeline.schedule.actions[0]]
    assert running.ended == [0, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("kind", "way_out"), [(After, "Make the passes without gradients before"), (Pair, r"torch\.cat")]
)
def test_what_needs_more_memory_is_warned_of_once(kind: type[Model], way_out: str) -> None:
    with pipeline(kind, num_ranks=1) as running:
        with pytest.warns(UserWarning, match=f"all 4 micro-batches are in memory.*{way_out}"):
            running.train(inputs())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            running.train(inputs(), is_first=True)


class Changing(Model):
    """Makes the passes whose names it is given, one after another."""

    def step(self, x: Tensor) -> Tensor:
        loss = x.new_zeros(())
        for name in self.passes:
            if name == "no_grad":
                self.reference(x)
            else:
                loss = loss + self(x).square().mean()
        return loss


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ("grad", "grad grad", "makes pass number 2 through blocks, with gradients, where it should have ended"),
        ("grad", "no_grad grad", r"makes pass number 1 through blocks, without gradients \(torch.no_grad\), where"),
        ("no_grad grad", "grad", "pass number 1 through blocks, with gradients, where a pass without"),
        ("no_grad grad", "no_grad", "has ended after 1 passes through blocks, where a pass with gradients"),
        ("no_grad grad", "no_grad no_grad grad", r"test_passes.py:\d+ \(x = block\(x\)\) makes pass number 2"),
    ],
)
def test_a_step_with_other_passes_than_the_first_one_is_refused(first: str, then: str, message: str) -> None:
    with pipeline(Changing, num_ranks=1) as running:
        running.model.passes = first.split()  # type: ignore[assignment]
        running.train(inputs())
        running.model.passes = then.split()  # type: ignore[assignment]
        with pytest.raises(UnsupportedError, match=f"{message}.* must make the same passes as its first one"):
            running.train(inputs())


def test_passes_may_change_in_the_first_batch_of_an_epoch() -> None:
    with pipeline(Changing) as running:
        for passes in ("grad", "no_grad grad", "grad"):
            running.model.passes = passes.split()  # type: ignore[assignment]
            running.train(inputs(), is_first=True)


def test_steps_of_an_evaluation_end_after_different_numbers_of_passes() -> None:
    x = inputs()

    def step(microbatch: int) -> Tensor:
        made = x[microbatch]
        for _ in range(1 + microbatch % 3):
            made = running.model(made)
        return made

    with pipeline(Model) as running:
        found = running.evaluate(step)
    with torch.no_grad():
        for made, wanted in zip(found, map(step, range(NUM_MICROBATCHES)), strict=True):
            torch.testing.assert_close(made, wanted, rtol=0, atol=1e-14)
    assert [len(cells) for cells in running.ran] == [8, 4, 2], "of rank 0's two stages, for 4, 2 and 1 micro-batches"


def test_different_passes_on_the_ranks_of_a_cube_are_refused_by_name() -> None:
    with pipeline(Model, num_ranks=1) as running:
        running.ranks[0].gather_in_cube = lambda value: [value, [2]]
        with pytest.raises(UnsupportedError, match=r"make different passes through blocks: \[\[\], \[2\]\]"):
            running.evaluate(lambda m: running.model(inputs()[m]))


class BackwardAfterReference(Model):
    def step(self, x: Tensor) -> Tensor:
        self.head(self.reference(x)).sum().backward()
        return self(x).square().mean()


class TakesOldOutput(Model):
    """The last block of the second pass gets what a block has made in the first one."""

    def step(self, x: Tensor) -> Tensor:
        first, second, third, last = self.blocks
        old = third(second(first(x)))
        last(old)
        third(second(first(x)))
        return last(old).square().mean()


@pytest.mark.parametrize(
    ("kind", "message"),
    [(BackwardAfterReference, r"calls backward\(\)"), (TakesOldOutput, "is the output of a block in another pass")],
)
def test_what_a_step_with_passes_must_not_do_is_refused(kind: type[Model], message: str) -> None:
    with pipeline(kind, num_ranks=1) as running, pytest.raises(UnsupportedError, match=message):
        running.train(inputs())

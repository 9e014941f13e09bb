"""A pipeline whose schedule has I and W trains like one process, and uses no more memory than the schedule says.

rank 0    0F0 0F1 ... 3I0 0I0     3W0 0W0 ...        I: the stage before goes on       W: when there is time
"""

import copy
import weakref
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.pipeline_parallel.p2p import HEADER
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.trace import costs_of, timeline_of
from lightning_hanayo.schedule import Kind, Schedule, build, simulate
from tests.runtime.queued_bytes import queued_bytes
from tests.runtime.test_engine import Model, batches, expected, pipeline
from tests.schedule.samples import split, table

SPLIT = [
    split(build("hanayo", num_ranks=2, num_microbatches=4)),
    split(build("hanayo", num_ranks=2, num_microbatches=4, num_waves=2)),
    split(build("hanayo", num_ranks=1, num_microbatches=4, num_waves=2)),
    split(build("gpipe", num_ranks=1, num_microbatches=4)),
    split(build("1f1b", num_ranks=4, num_microbatches=4)),
    build("zb-h1", num_ranks=4, num_microbatches=4),
    build("zbv", num_ranks=2, num_microbatches=4),
    build("zbv", num_ranks=4, num_microbatches=4),
    build("interleaved-zb", num_ranks=2, num_microbatches=4),
    build("interleaved-zb", num_ranks=2, num_microbatches=4, num_stages_per_rank=4),
]


class Shared(Model):
    """Two blocks of the first stage have one weight."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.blocks[1].linear.weight = self.blocks[0].linear.weight


class Checkpointed(Model):
    """Every second block recomputes its activations; `count` is how often."""

    count = 0

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        for i, block in enumerate(self.blocks):
            self._checkpoint(block, use_reentrant=bool(i % 2))

    def _checkpoint(self, block: Any, use_reentrant: bool) -> None:
        def inner(x: Tensor) -> Tensor:
            Checkpointed.count += 1
            return torch.tanh(block.linear(block.norm(x)))

        def forward(x: Tensor, scale: Tensor | None = None, bias: float = 0.0) -> Tensor:
            y = checkpoint(inner, x, use_reentrant=use_reentrant)
            return x + (y if scale is None else y * scale) + bias

        block.forward = forward


def frozen(num_blocks: int) -> Model:
    model = Model(num_blocks)
    model.embedding.requires_grad_(False)
    for block in model.blocks[::2]:
        block.linear.weight.requires_grad_(False)
    return model


def hooked(num_blocks: int) -> Model:
    model = Model(num_blocks)
    for block in model.blocks[::2]:
        block.linear.weight.register_hook(lambda gradient: 2 * gradient)
    return model


def assert_close(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-10, msg=name)


CASES = [(schedule, kind) for kind in (Model, Shared, frozen, hooked) for schedule in SPLIT
         if kind is not Shared or schedule.num_stages <= 4]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "build_model"),
    CASES,
    ids=[f"{kind.__name__}-{s.name}-P{s.num_ranks}-S{s.num_stages}" for s, kind in CASES],
)
def test_exact_over_accumulated_batches(schedule: Schedule, build_model: Any) -> None:
    torch.manual_seed(0)
    model = build_model(8).double()
    torch.manual_seed(0)
    reference = build_model(8).double()
    with pipeline(model, schedule) as running:
        for batch in batches(2):
            losses = running.run(lambda m, batch=batch: model.step(batch[m]), [1 / 4] * 4)
            torch.testing.assert_close(torch.stack(losses), torch.stack(expected(reference, batch)), rtol=0, atol=1e-12)
            assert_close(model, reference)
        assert [queued_bytes(queue) for queue in running.queues] == [0] * len(running.queues)
        assert sorted(running.reduced) == sorted(2 * list(range(running.schedule.num_stages)))


IN_ORDER = table("0F0 0F1 3F0 3I0 3F1 3I1 0I0 0I1 3W0 0W0 3W1 0W1", "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1",
                 stage_ranks=(0, 1, 1, 0), num_microbatches=2)  # fmt: skip


def test_bit_equal_where_weight_gradients_run_in_order() -> None:
    torch.manual_seed(0)
    model = Model(4)
    reference = copy.deepcopy(model)
    with pipeline(model, IN_ORDER) as running:
        for batch in batches(3, (2, 2)):
            running.run(lambda m, batch=batch: model.step(batch[m]), [1 / 2] * 2)
            expected(reference, batch)
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


def test_checkpointed_blocks_are_run_again_once() -> None:
    torch.manual_seed(0)
    model = Checkpointed(4).double()
    torch.manual_seed(0)
    reference = Checkpointed(4).double()
    (batch,) = batches(1)
    with pipeline(model, SPLIT[0]) as running:
        Checkpointed.count = 0
        running.run(lambda m: model.step(batch[m]), [1 / 4] * 4)
        assert Checkpointed.count == 2 * 4 * 4  # forward and I, four blocks, four micro-batches
    expected(reference, batch)
    assert_close(model, reference)


def test_bf16_autocast_is_bit_equal() -> None:
    torch.manual_seed(0)
    model = Model(4)
    reference = copy.deepcopy(model)
    (batch,) = batches(1, (2, 2))

    def autocast() -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    with pipeline(model, IN_ORDER) as running:
        running.run(lambda m: model.step(batch[m]), [1 / 2] * 2, context=autocast)
    for tokens in batch:
        with autocast():
            loss = reference.step(tokens)
        (loss / 2).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name


class Watched(nn.Module):
    """tanh between two layers: only I needs what its backward keeps."""

    kept: list[weakref.ref[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(_Keep.apply(self.up(x)))


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = torch.ones_like(x)
        Watched.kept.append(weakref.ref(ctx.kept))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.kept


class WatchedModel(Model):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Watched() for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.embedding.weight.T


ALL_LATE = table("0F0 0F1 3F0 3I0 3F1 3I1 0I0 0I1 0W1 3W1 3W0 0W0", "1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1",
                 stage_ranks=(0, 1, 1, 0), num_microbatches=2)  # fmt: skip


def test_memory_only_for_the_input_gradient_is_freed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """W needs (x, dy) of each layer and nothing else: 2 micro-batches of 2 x 5 rows, 8 and 16 columns, x and dy."""
    held: list[tuple[int, int]] = []
    drain = WeightGradientQueue.drain
    model = WatchedModel()
    (batch,) = batches(1, (2, 2))
    Watched.kept = []
    with pipeline(model, ALL_LATE) as running:

        def watched(queue: WeightGradientQueue, microbatch: int) -> None:
            index = running.queues.index(queue)
            if index in (0, 3):  # rank 0's, whose Ws stand behind all its Is; the other rank may be anywhere
                alive = sum(kept() is not None for kept in Watched.kept)
                held.append((alive, queued_bytes(running.queues[0]) + queued_bytes(running.queues[3])))
            drain(queue, microbatch)

        monkeypatch.setattr(WeightGradientQueue, "drain", watched)
        running.run(lambda m: model.step(batch[m]), [1 / 2] * 2)
    one = 2 * 5 * (8 + 16 + 16 + 8) * 4 + HEADER  # what came from the other rank lies in its message
    assert held == [(0, 4 * one), (0, 3 * one), (0, 2 * one), (0, one)]


def test_the_trace_measures_both_halves() -> None:
    model = Model(8)
    (batch,) = batches(1)
    schedule = build("zbv", num_ranks=2, num_microbatches=4)
    with pipeline(model, schedule) as running:
        running.run(lambda m: model.step(batch[m]), [1 / 4] * 4)
        measured = [[engine.trace.batches[0] for engine in running.engines]]
    assert [tuple(event.action for event in events) for events in measured[0]] == list(schedule.actions)
    costs = costs_of(schedule, measured)

    def mean(stage: int, kind: Kind) -> float:
        return fmean(e.end - e.start for events in measured[0] for e in events
                     if (e.action.stage, e.action.kind) == (stage, kind))  # fmt: skip

    for cost, kind in ((costs.forward, Kind.F), (costs.backward_input, Kind.I), (costs.backward_weight, Kind.W)):
        assert cost == pytest.approx(tuple(mean(stage, kind) for stage in range(4)))
    assert simulate(schedule, costs).makespan > 0
    assert len(timeline_of(schedule, measured[0]).spans) == 3 * 4 * 4


def in_place(model: Model) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)


def as_modules(model: Model) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager", fullgraph=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compile_blocks", [pytest.param(in_place, marks=pytest.mark.thorough), as_modules])
def test_compiled_blocks(compile_blocks: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(4).double()
    reference = copy.deepcopy(model)
    compile_blocks(model)
    with pipeline(model, build("zbv", num_ranks=2, num_microbatches=4)) as running:
        for batch in batches(2):
            running.run(lambda m, batch=batch: model.step(batch[m]), [1 / 4] * 4)
            expected(reference, batch)
    assert_close(model, reference)

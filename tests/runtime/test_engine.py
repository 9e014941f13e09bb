"""The engine runs every schedule over the loopback transport, bit-equal to one process that adds in the same order."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.schedule import Schedule, build
from tests.runtime.loopback_pipeline import LoopbackPipeline


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: Tensor | None = None, bias: float = 0.0) -> Tensor:
        y = torch.tanh(self.linear(self.norm(x)))
        return x + (y if scale is None else y * scale) + bias


class Model(nn.Module):
    """Tied embedding and head around a stack of blocks."""

    def __init__(self, num_blocks: int, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.scale = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, scale=self.scale if i % 2 else None, bias=0.1 * (i % 3))
        return x @ self.embedding.weight.T

    def step(self, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(tokens).flatten(0, 1), tokens.flatten())


@contextmanager
def pipeline(model: Any, schedule: Schedule) -> Iterator[LoopbackPipeline]:
    running = LoopbackPipeline(model.blocks, schedule)
    try:
        yield running
    finally:
        running.close()


def batches(count: int, sizes: tuple[int, ...] = (2, 2, 2, 2), length: int = 5) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randint(0, 11, (size, length), generator=generator) for size in sizes] for _ in range(count)]


def expected(model: Any, batch: list[Tensor]) -> list[Tensor]:
    losses = []
    for tokens in batch:
        loss = model.step(tokens)
        (loss * (1 / len(batch))).backward()
        losses.append(loss.detach())
    return losses


SCHEDULES = [
    ("hanayo", {"num_ranks": 2}),
    ("hanayo", {"num_ranks": 2, "num_waves": 2}),
    ("hanayo", {"num_ranks": 4}),
    ("hanayo", {"num_ranks": 1, "num_waves": 2}),
    ("gpipe", {"num_ranks": 2}),
    ("gpipe", {"num_ranks": 1}),
    ("1f1b", {"num_ranks": 4}),
    ("interleaved", {"num_ranks": 2, "num_stages_per_rank": 4}),
]


@pytest.mark.parametrize(("name", "sizes"), SCHEDULES, ids=lambda value: str(value))
def test_bit_equal_to_one_process(name: str, sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Model(8)
    reference = copy.deepcopy(model)
    with pipeline(model, build(name, num_microbatches=4, **sizes)) as running:
        for batch in batches(3):
            losses = running.run(lambda m, batch=batch: model.step(batch[m]), [1 / 4] * 4)
            assert torch.equal(torch.stack(losses), torch.stack(expected(reference, batch)))
            for (parameter_name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
                assert torch.equal(ours.grad, theirs.grad), parameter_name


def test_shapes_may_change_from_batch_to_batch_and_within_one() -> None:
    torch.manual_seed(0)
    model = Model(4)
    reference = copy.deepcopy(model)
    with pipeline(model, build("hanayo", num_ranks=2, num_microbatches=4)) as running:
        for signature, batch in enumerate(
            [*batches(2), *batches(2, (3, 3, 3, 2)), *batches(1, length=7), *batches(1, (1, 2, 3, 4))]
        ):
            running.run(lambda m, batch=batch: model.step(batch[m]), [1 / 4] * 4, signature=signature // 2)
            expected(reference, batch)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_evaluation_runs_forward_only() -> None:
    model = Model(4)
    (batch,) = batches(1)
    with pipeline(model, build("hanayo", num_ranks=2, num_microbatches=4)) as running, torch.no_grad():
        # grad mode belongs to a thread: the ranks here are threads of their own, so each step turns it off itself
        losses = running.run(lambda m: model.step(batch[m]), [1 / 4] * 4, train=False)
        assert torch.equal(torch.stack([loss.detach() for loss in losses]), torch.stack([model.step(t) for t in batch]))


def test_gradients_are_reduced_once_per_stage() -> None:
    model = Model(4)
    (batch,) = batches(1)
    with pipeline(model, build("hanayo", num_ranks=2, num_microbatches=4)) as running:
        running.run(lambda m: model.step(batch[m]), [1 / 4] * 4)
        assert sorted(running.reduced) == [0, 1, 2, 3]


class Skip(Model):
    """The head sees the embedding too: the loss's graph reaches past the stack."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.embedding(tokens).tanh() @ self.embedding.weight.T


class SkipInside(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = start = self.embedding(tokens).tanh()
        for block in self.blocks:
            x = block(x)
        return (x + start) @ self.embedding.weight.T


class ChangesOutput(Model):
    """The stack's output is changed in place, so its tensor gets another node."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = start = self.embedding(tokens).tanh()
        for block in self.blocks:
            x = block(x)
        x += start
        return x @ self.embedding.weight.T


class CallsCopy(Model):
    """The step calls a copy of the model, an average say."""

    def forward(self, tokens: Tensor) -> Tensor:
        if not hasattr(self, "twin"):
            self.__dict__["twin"] = [copy.deepcopy(self.blocks)]
        with torch.no_grad():
            x = self.embedding(tokens)
            for block in self.__dict__["twin"][0]:
                x = block(x)
        return super().forward(tokens) + x @ self.embedding.weight.T


@pytest.mark.parametrize("kind", [Skip, SkipInside, ChangesOutput, CallsCopy])
def test_a_skip_connection_past_the_stack_is_exact(kind: type[Model]) -> None:
    torch.manual_seed(0)
    model = kind(4).double()
    reference = copy.deepcopy(model)
    (batch,) = batches(1)
    with pipeline(model, build("hanayo", num_ranks=2, num_microbatches=4)) as running:
        running.run(lambda m: model.step(batch[m]), [1 / 4] * 4)
    expected(reference, batch)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-14)


class Between(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
            x = x * x.max().item()
        return x @ self.embedding.weight.T


class PartlyFrozen(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            with torch.set_grad_enabled(i > 1):
                x = block(x)
        return x @ self.embedding.weight.T


class Half(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks[: self.depth]:
            x = block(x)
        return x @ self.embedding.weight.T

    depth = 1


class Shallow(Half):
    depth = 3


class DropsBlock(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x) if i != 2 else x
        return x @ self.embedding.weight.T


class CallsChildren(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block.linear(block.norm(x))
        return x @ self.embedding.weight.T


class SkipsByNone(Model):
    def step(self, tokens: Tensor) -> Tensor | None:  # type: ignore[override]
        return None


class NoLoss(Model):
    def step(self, tokens: Tensor) -> Tensor | None:  # type: ignore[override]
        super().step(tokens)
        return None


class Odd(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, scale=object())
        return x


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Between,
            r"test_engine.py:\d+ \(x = x \* x.max\(\).item\(\)\) uses .* before blocks\[2\].* functions of torch",
        ),
        (PartlyFrozen, r"blocks\[2\] is called with grad mode on, and the blocks before it with grad mode off"),
        (Half, r"ended after 1 of the 4 blocks.* left out .*must be called as well"),
        (Shallow, r"the step ended after 3 of the 4 blocks of blocks.* left out .*must be called"),
        (DropsBlock, r"blocks\[3\] is called where blocks\[2\] is next.* left out .*must be called as well"),
        (
            CallsChildren,
            r"ended after 0 of the 4 blocks.*Only calls of the blocks themselves count, .*blocks\[0\]\(x\)",
        ),
        (SkipsByNone, r"ended after 0 of the 4 blocks.*It returned None, but no micro-batch can be skipped"),
        (NoLoss, r"training_step returned NoneType.* By None no micro-batch can be skipped"),
        (Odd, r"argument 'scale' of blocks\[1\] is a builtins.object"),
    ],
)
def test_an_unsupported_step_raises_an_error_that_names_the_cause(kind: type[Model], message: str) -> None:
    if kind is Odd:
        Block.forward, inner = (lambda self, x, scale=None, bias=0.0: inner(self, x)), Block.forward
    model = kind(4)
    (batch,) = batches(1)
    try:
        with (
            pipeline(model, build("hanayo", num_ranks=1, num_microbatches=4, num_waves=2)) as running,
            pytest.raises(UnsupportedError, match=message),
        ):
            running.run(lambda m: model.step(batch[m]), [1 / 4] * 4)
    finally:
        if kind is Odd:
            Block.forward = inner


class FailsBefore(Model):
    """Its step, or a block in its forward or backward, takes a micro-batch for a batch."""

    def step(self, tokens: Tensor) -> Tensor:
        return super().step(tokens.view(8, -1))


class FailsAfter(Model):
    def step(self, tokens: Tensor) -> Tensor:
        return super().step(tokens).view(8)


class FailsInBlock(Model):
    where = "forward"

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.blocks[2].where = self.where
        self.blocks[2].__class__ = ForWholeBatches


class FailsInBackward(FailsInBlock):
    where = "backward"


class ForWholeBatches(Block):
    where: str

    def forward(self, x: Tensor, scale: Tensor | None = None, bias: float = 0.0) -> Tensor:
        y = super().forward(x, scale, bias)
        if self.where == "backward":
            y.register_hook(lambda gradient: gradient.view(8, -1, 8))
        return y.view(8, -1, 8) if self.where == "forward" else y


@pytest.mark.parametrize("kind", [FailsBefore, FailsAfter, FailsInBlock, FailsInBackward])
def test_an_error_says_on_which_micro_batch_it_was(kind: type[Model]) -> None:
    model = kind(4)
    (batch,) = batches(1)
    with (
        pipeline(model, build("hanayo", num_ranks=1, num_microbatches=4, num_waves=2)) as running,
        pytest.raises(RuntimeError, match=r"shape '\[8") as caught,
    ):
        running.run(lambda m: model.step(batch[m]), [1 / 4] * 4)
    (note,) = caught.value.__notes__
    assert note.startswith("This was on micro-batch 0 (of 0 to 3)")


class SeesAutocast(torch.autograd.Function):
    """Records whether its backward runs under autocast."""

    seen: list[bool] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        SeesAutocast.seen.append(torch.is_autocast_enabled("cpu"))
        return gradient


class Watched(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        return SeesAutocast.apply(super().forward(tokens))


def test_backward_runs_outside_autocast_as_lightnings_does() -> None:
    model = Watched(4)
    (batch,) = batches(1)
    with pipeline(model, build("hanayo", num_ranks=1, num_microbatches=4, num_waves=2)) as running:

        def step(microbatch: int) -> Tensor:
            assert torch.is_autocast_enabled("cpu")
            return model.step(batch[microbatch])

        running.run(step, [1 / 4] * 4, context=lambda: torch.autocast("cpu", torch.bfloat16))
    assert SeesAutocast.seen == [False] * 4


def test_a_micro_batch_with_weight_0_adds_nothing_not_even_a_nan() -> None:
    torch.manual_seed(0)
    model = Model(4)
    reference = copy.deepcopy(model)
    (batch,) = batches(1)

    def step(microbatch: int) -> Tensor:
        return model.step(batch[microbatch]) * (float("nan") if microbatch == 2 else 1.0)

    with pipeline(model, build("hanayo", num_ranks=2, num_microbatches=4)) as running:
        running.run(step, [1 / 3, 1 / 3, 0.0, 1 / 3])
    expected(reference, [batch[0], batch[1], batch[3]])
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Shift(nn.Module):
    """Its parameter's gradient is its input's: autograd may give both the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift.view(2, 3)


def test_gradients_reduced_in_place_are_not_shared() -> None:
    """One micro-batch, one rank, two stages: 1's gradients are reduced while its input's waits for stage 0."""
    blocks = nn.ModuleList([Shift(), Shift()])
    running = LoopbackPipeline(blocks, build("hanayo", num_ranks=1, num_microbatches=1))
    engine = running.engines[0]
    engine.reduce_gradients = lambda stage: blocks[stage].shift.grad.mul_(10.0)  # as if ten replicas were summed
    try:
        running.run(lambda _: blocks[1](blocks[0](torch.ones(2, 3, requires_grad=True))).square().sum(), [1.0])
    finally:
        running.close()
    assert [block.shift.grad.unique().tolist() for block in blocks] == [[20.0], [20.0]]

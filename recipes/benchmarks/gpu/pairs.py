"""Measures two micro-batches at once on one device: a Llama stack whose collectives a waiting stream emulates.

    one by one    F1 gather |block| gather |block| B1 ...      the device is idle while it waits for a collective
    F+B           F2 gather |block|  ...                       the other micro-batch's block runs meanwhile
                  B1        gather   |block's backward|

Each block waits for a collective before its forward, and another one before its backward; each takes as long as the
forward of a block. Without collectives the step takes `compute`; all of them take `link`.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.pairs import RECORDED, Pairs
from lightning_hanayo.pipeline_parallel.profiling.trace import Trace
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from recipes.benchmarks.gpu.card import Card
from recipes.benchmarks.gpu.models import LlamaStack, Sizes, build
from recipes.benchmarks.gpu.steps import Say
from recipes.benchmarks.harness import Summary
from recipes.benchmarks.pairs.tables import ALONE, STEADY, WAYS, table_of
from recipes.benchmarks.self_contained import SelfContainedSingleStage

FEW, MANY = 2, 6
"""micro-batches of the two steps whose difference is what a further micro-batch adds"""
Transfer = Callable[[], None]
"""starts a collective, and waits for it"""


@dataclass(frozen=True)
class PairFigures:
    """What a further micro-batch adds, in seconds."""

    width: int
    num_blocks: int
    tokens: int
    collective: float
    """seconds of each: two for each block and micro-batch"""
    compute: Summary
    """one by one, without collectives"""
    alone: Summary
    """one by one"""
    paired: Summary
    """a forward at once with another micro-batch's backward"""

    @property
    def link(self) -> float:
        """Seconds of all collectives."""
        return 2 * self.num_blocks * self.collective

    def multiple(self, seconds: float) -> float:
        """Compared with max(compute, link), the least that is possible."""
        return seconds / max(self.compute.median, self.link)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> "PairFigures":
        """From JSON."""
        times = "compute", "alone", "paired"
        return PairFigures(**{**plain, **{name: Summary(**plain[name]) for name in times}})


def measure(sizes: Sizes, tokens: int, card: Card, rounds: int, say: Say) -> PairFigures:
    """Run steps one by one and in pairs, in turn."""
    stack = Stack(sizes, tokens, card)
    stack.adds(ALONE)
    compute = [stack.adds(ALONE) for _ in range(rounds)]
    stack.collective = median(compute) / 3 / sizes.num_blocks
    for _ in range(RECORDED + 1):
        stack.step(STEADY, MANY)
    times: dict[str, list[float]] = {ALONE: [], STEADY: []}
    for _ in range(rounds):
        for way, found in times.items():
            found.append(stack.adds(way))
    stack.close()
    figures = PairFigures(sizes.width, sizes.num_blocks, tokens, stack.collective, Summary.of(compute),
                          Summary.of(times[ALONE]), Summary.of(times[STEADY]))  # fmt: skip
    say(f"pairs, {tokens} tokens: one by one {figures.multiple(figures.alone.median):.2f} of max(compute, link), "
        f"F+B {figures.multiple(figures.paired.median):.2f}")  # fmt: skip
    return figures


class Stack:
    """The blocks of a Llama in the engine, each behind an emulated collective."""

    def __init__(self, sizes: Sizes, tokens: int, card: Card) -> None:
        self.collective = 0.0
        """seconds of each; 0: there is none"""
        self._card, self._queue = card, card.link_queue()
        model = build("llama", sizes, tokens, card.device).to(torch.bfloat16)
        assert isinstance(model, LlamaStack)
        with card.device:
            self._inputs = [torch.randn(1, tokens, sizes.width, dtype=torch.bfloat16) for _ in range(MANY)]
            positions = model.rotary(self._inputs[0], torch.arange(tokens).unsqueeze(0))
        blocks = [_Gathering(block, positions, self._transfer) for block in model.blocks]
        weights = WeightGradientQueue()
        stage = SelfContainedSingleStage(blocks=[*blocks, _Loss()], queue=weights, num_blocks=len(blocks) + 1)
        self._model = model
        self._pairs = Pairs(
            self._queue, [weights], lambda plans: plans or {}, is_first=True, is_planned=self._queue.keeps_plans
        )
        channel: Any = _NoChannel()
        self._engine = Engine({0: stage}, channel, lambda _: None, Trace(), pairs=self._pairs)

    def adds(self, way: str) -> float:
        """Seconds that a further micro-batch adds to a step."""
        few, many = (self.step(way, count) for count in (FEW, MANY))
        return (many - few) / (MANY - FEW)

    def step(self, way: str, num_microbatches: int) -> float:
        """Run a step, and return the seconds that the device takes."""
        program = Program.from_schedule(table_of(way, num_microbatches), 0)
        inputs = [one.detach().requires_grad_() for one in self._inputs[:num_microbatches]]
        batch = Batch(
            inputs=inputs, loss_weights=[1.0] * num_microbatches, reduce_gradients=False, signature=WAYS.index(way)
        )

        def run() -> None:
            self._engine.begin_batch()
            self._engine.run(program, batch)
            self._engine.end_batch()

        self._model.zero_grad()
        self._card.synchronize()
        return self._card.seconds_of(run)

    def close(self) -> None:
        """End the threads."""
        self._pairs.close()

    def _transfer(self) -> None:
        if self.collective:
            self._queue.start(lambda: self._card.transfer(self.collective)).wait()


class _Gathering(nn.Module):
    def __init__(self, block: nn.Module, positions: tuple[Tensor, Tensor], transfer: Transfer) -> None:
        super().__init__()
        self.block, self.positions, self.transfer = block, positions, transfer

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[1, tokens, width] to the same."""
        y: Tensor = self.block(_Collective.apply(x, self.transfer, None), position_embeddings=self.positions)
        made: Tensor = _Collective.apply(y, None, self.transfer)
        return made


class _Collective(torch.autograd.Function):
    """Waits for a collective in the forward, or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Transfer | None, backward: Transfer | None) -> Tensor:
        ctx.transfer = backward
        if forward is not None:
            forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.transfer is not None:
            ctx.transfer()
        return gradient, None, None


class _Loss(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        """The mean square, a scalar."""
        return x.float().square().mean()


class _NoChannel:
    """One rank sends no messages."""

    def begin_batch(self, signature: int) -> None:
        """Called by the engine."""

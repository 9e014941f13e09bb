"""The parts of the benchmark of one GPU, their sizes, and their figures: a GPU's, and toy ones for any machine.

memory      a stage with micro-batches in flight, with its sent outputs freed and with all of them kept
products    how much slower matrix products run while thread blocks spin, as those of a waiting receive do
pairs       two micro-batches at once: a Llama stack whose collectives a waiting stream emulates

    one by one    F1 gather |block| gather |block| B1 ...      the device is idle while it waits for a collective
    F+B           F2 gather |block|  ...                       the other micro-batch's block runs meanwhile
                  B1        gather   |block's backward|

Each block waits for a collective before its forward, and another one before its backward; each takes as long as the
forward of a block. Without collectives the step takes `compute`; all of them take `link`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.engine import Engine, Program
from lightning_hanayo.pipeline_parallel.p2p import Message, gradient_message
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from lightning_hanayo.pipeline_parallel.trace import Trace
from recipes.benchmarks.gpu import steps
from recipes.benchmarks.gpu.card import Card
from recipes.benchmarks.gpu.models import COMPILED, EAGER, Candidate, Case, Kind, LlamaStack, Precision, Sizes, build
from recipes.benchmarks.gpu.steps import CaseFigures, Rounds, Say
from recipes.benchmarks.harness import Summary
from recipes.benchmarks.pairs.tables import ALONE, STEADY, table_of
from recipes.benchmarks.self_contained import SelfContainedFirstStage, SelfContainedSingleStage
from recipes.gpt.module import Block

IN_FLIGHT = 8


@dataclass(frozen=True)
class MemoryFigures:
    """Bytes at the peak, beyond the stage's weights and inputs."""

    width: int
    tokens: int
    num_in_flight: int
    output_bytes: int
    """of one micro-batch"""
    kept: int
    freed: int

    @property
    def saved(self) -> float:
        """In outputs per micro-batch in flight: 1 if each was freed."""
        return (self.kept - self.freed) / self.num_in_flight / self.output_bytes


def measure_memory(sizes: Sizes, tokens: int, card: Card, say: Say) -> MemoryFigures:
    """Run one stage of one GPT block both ways."""
    run = _memory_runner(sizes, tokens, card.device)
    run(False)  # the weights' gradients, and what libraries allocate once
    kept, freed = (card.peak_memory_of(lambda keeps=keeps: run(keeps)) for keeps in (True, False))  # type: ignore[misc]
    element = torch.bfloat16.itemsize
    found = MemoryFigures(sizes.width, tokens, IN_FLIGHT, tokens * sizes.width * element, kept, freed)
    say(f"memory: {IN_FLIGHT} micro-batches of {tokens} tokens in flight: {kept / 2**20:.0f} MB with all sent outputs "
        f"kept, {freed / 2**20:.0f} MB with them freed: {found.saved:.2f} outputs per micro-batch")  # fmt: skip
    return found


def _memory_runner(sizes: Sizes, tokens: int, device: torch.device) -> Callable[[bool], None]:
    """Returns a function that runs all forwards and then all backwards, and keeps each output meanwhile if told so."""
    with device:
        block = Block(sizes.width, sizes.num_heads, 0.0).to(torch.bfloat16)
        inputs = [torch.randn(1, tokens, sizes.width, dtype=torch.bfloat16) for _ in range(IN_FLIGHT)]
        gradient = torch.randn(1, tokens, sizes.width, dtype=torch.bfloat16)
    stage = SelfContainedFirstStage(blocks=[block], queue=WeightGradientQueue(), num_blocks=2)
    batch = Batch(inputs=inputs, loss_weights=[1.0] * IN_FLIGHT)

    def run(keeps: bool) -> None:
        kept: list[Message | None] = []
        stage.begin_batch()
        for microbatch in range(IN_FLIGHT):
            made = stage.forward(batch, microbatch, None)
            if keeps:
                kept.append(made)
            del made  # the next forward must not find it
        for microbatch in range(IN_FLIGHT):
            stage.backward(batch, microbatch, gradient_message([gradient]))
        stage.end_batch()

    return run


BLOCKS = 0, 4, 16, 32
ROUNDS, PRODUCTS = 7, 10
SECONDS = 0.05
"""for which the blocks spin; the products must have ended before"""


@dataclass(frozen=True)
class ProductFigures:
    """Products [rows, inner] x [inner, columns] while `num_blocks` thread blocks spin; seconds per product."""

    shape: tuple[int, int, int]
    num_blocks: int
    time: Summary
    teraflops: float
    of_alone: float
    """speed compared with that of the products alone"""
    overlapped: bool
    """whether the blocks still spun when the products had ended"""


def measure_products(shape: tuple[int, int, int], card: Card, say: Say) -> list[ProductFigures]:
    """Time products next to each number of spinning blocks, in turn. `shape`: rows, inner, columns."""
    rows, inner, columns = shape
    with card.device:
        left, right = (torch.randn(*size, dtype=torch.bfloat16) for size in ((rows, inner), (inner, columns)))
        out = torch.empty(rows, columns, dtype=torch.bfloat16)

    def run() -> None:
        for _ in range(PRODUCTS):
            torch.mm(left, right, out=out)

    times: dict[int, list[float]] = {blocks: [] for blocks in BLOCKS}
    overlapped = dict.fromkeys(BLOCKS, True)
    for turn in range(-1, ROUNDS):
        for blocks in BLOCKS:
            with card.spinning(blocks, SECONDS) as still_spins:
                seconds = card.seconds_of(run) / PRODUCTS
                if turn >= 0:
                    times[blocks].append(seconds)
                    overlapped[blocks] &= still_spins()
    found = [_product_figures(shape, blocks, times, overlapped[blocks]) for blocks in BLOCKS]
    for one in found:
        say(f"products {rows} x {inner} x {columns}, {one.num_blocks} spinning blocks: {one.teraflops:.1f} TFLOP/s, "
            f"{one.of_alone:.3f} of alone")  # fmt: skip
    return found


def _product_figures(
    shape: tuple[int, int, int], blocks: int, times: Mapping[int, Sequence[float]], overlapped: bool
) -> ProductFigures:
    time, alone = Summary.of(times[blocks]), Summary.of(times[0])
    teraflops = 2 * shape[0] * shape[1] * shape[2] / time.median / 1e12
    return ProductFigures(shape, blocks, time, teraflops, alone.median / time.median, overlapped)


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


def measure_pairs(sizes: Sizes, tokens: int, card: Card, rounds: int, say: Say) -> PairFigures:
    """Run steps one by one and in pairs, in turn."""
    stack = Stack(sizes, tokens, card)
    stack.adds(ALONE)
    compute = [stack.adds(ALONE) for _ in range(rounds)]
    stack.collective = median(compute) / 3 / sizes.num_blocks
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
        stage = SelfContainedSingleStage(blocks=[*blocks, _MeanSquare()], queue=weights, num_blocks=len(blocks) + 1)
        self._model = model
        self._queue.turns.states = [weights]
        channel: Any = _NoChannel()
        self._engine = Engine({0: stage}, channel, lambda _: None, Trace(), turns=self._queue.turns)

    def adds(self, way: str) -> float:
        """Seconds that a further micro-batch adds to a step."""
        few, many = (self.step(way, count) for count in (FEW, MANY))
        return (many - few) / (MANY - FEW)

    def step(self, way: str, num_microbatches: int) -> float:
        """Run a step, and return the seconds that the device takes."""
        program = Program.from_schedule(table_of(way, num_microbatches), 0)
        inputs = [one.detach().requires_grad_() for one in self._inputs[:num_microbatches]]
        batch = Batch(inputs=inputs, loss_weights=[1.0] * num_microbatches, reduce_gradients=False)

        def run() -> None:
            self._engine.begin_batch()
            self._engine.run(program, batch)
            self._engine.end_batch()

        self._model.zero_grad()
        self._card.synchronize()
        return self._card.seconds_of(run)

    def close(self) -> None:
        """End the threads."""
        self._queue.close()

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


class _MeanSquare(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        """The mean square, a scalar."""
        return x.float().square().mean()


class _NoChannel:
    """One rank sends no messages."""

    def begin_batch(self, signature: int) -> None:
        """Called by the engine."""


_STAGE, _WAVES, _LAYERS = (one.label for one in EAGER[1:])


@dataclass(frozen=True)
class Bar:
    """The least speed of a candidate, compared with the plain Trainer's."""

    kind: Kind
    label: str
    least: float

    def verdict(self, cases: Sequence[CaseFigures], tokens: int) -> str:
        """Whether it was reached at `tokens` tokens, in a line."""
        speeds = [case.speed(self.label) for case in cases if (case.kind, case.tokens) == (self.kind, tokens)]
        head = f"{self.kind}, {tokens} tokens, {self.label}: at least {self.least} of plain"
        if not speeds or speeds[0] is None:
            return f"{head}: not measured"
        return f"{head}: {'reached' if speeds[0] >= self.least else 'MISSED'}, {speeds[0]:.3f}"


BARS = tuple(
    Bar(kind, label, least)
    for kind in ("llama", "gpt")
    for label, least in (
        (_STAGE, 0.97),
        (_STAGE + COMPILED, 0.97),
        (_WAVES, 0.97),
        (_WAVES + COMPILED, 0.97),
        (_LAYERS, 0.95),
        (_LAYERS + COMPILED, 0.98),
    )
)


@dataclass
class Figures:
    """What was measured; a part that didn't run, or failed, left nothing."""

    machine: list[str]
    peak: float | None
    """of the device, in TFLOP/s"""
    bar_tokens: int
    steps: list[CaseFigures] = field(default_factory=list)
    host: list[CaseFigures] = field(default_factory=list)
    """the same with models so narrow that the host decides how long a step takes"""
    memory: list[MemoryFigures] = field(default_factory=list)
    products: list[ProductFigures] = field(default_factory=list)
    pairs: list[PairFigures] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """parts that failed, and with what error"""

    @property
    def verdicts(self) -> list[str]:
        """A line for each bar."""
        return [bar.verdict(self.steps, self.bar_tokens) for bar in BARS]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"bars": self.verdicts}


@dataclass(frozen=True)
class Scale:
    """The sizes of a run."""

    models: Mapping[Kind, Sizes]
    narrow: Mapping[Kind, Sizes]
    """so narrow that the GPU waits for the host"""
    tokens: tuple[int, ...]
    """per micro-batch"""
    bar_tokens: int
    """the one of them at which bars are checked; compiled blocks run there alone"""
    longest: int
    """sequence; more tokens are several sequences"""
    product: tuple[int, int, int]

    def cases(self, kind: Kind, asked: Sequence[Candidate]) -> list[Case]:
        """The cases of a model."""
        found = []
        for tokens in self.tokens:
            sequence = min(tokens, self.longest)
            candidates = tuple(one for one in asked if tokens == self.bar_tokens or not one.is_compiled)
            found.append(Case(kind, self.models[kind], tokens // sequence, sequence, candidates))
        return [case for case in found if case.candidates]

    def host_cases(self, asked: tuple[Candidate, ...]) -> list[Case]:
        """The cases of narrow models."""
        return [Case(kind, sizes, 1, 16, asked) for kind, sizes in self.narrow.items()]


LLAMA_7B = Sizes(width=4096, num_heads=32, feed_forward=11008, num_blocks=4)
GPT_BLOCKS = Sizes(width=2048, num_heads=16, feed_forward=8192, num_blocks=4, vocabulary=32000)
_NARROW: Mapping[Kind, Sizes] = {"llama": Sizes(64, 4, 128, 4), "gpt": Sizes(64, 4, 256, 4, 64)}
FULL = Scale({"llama": LLAMA_7B, "gpt": GPT_BLOCKS}, _NARROW, (1024, 4096, 16384), 4096, 4096, (4096, 4096, 11008))
TOY = Scale({"llama": Sizes(16, 2, 32, 4), "gpt": Sizes(16, 2, 64, 4, 32)}, _NARROW, (16,), 16, 8, (8, 8, 8))


PARTS = ("products", "memory", "pairs", "llama", "gpt", "host")
"""in the order in which they run: the quick ones first"""


@dataclass(frozen=True)
class Run:
    """One run of the benchmark: where, at which sizes, and how often."""

    card: Card
    scale: Scale
    rounds: Rounds
    candidates: tuple[Candidate, ...]
    precision: Precision
    say: Say

    def measure(self, parts: Sequence[str], keep: Callable[[Figures], None]) -> Figures:
        """Run the parts, one after the other; one that fails is noted, and the others go on.

        `keep` is called after each part and each case, so that a run that is killed leaves what it has measured.
        """
        figures, begin = Figures([], self.card.peak, self.scale.bar_tokens), time.monotonic()
        for part in parts:
            try:
                self._measure(part, figures, keep)
            except Exception as error:
                figures.failed[part] = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                self.say(f"{part} failed: {figures.failed[part]}")
            keep(figures)
            self.say(f"{time.monotonic() - begin:.0f} s: {part} has ended")
        return figures

    def _measure(self, part: str, figures: Figures, keep: Callable[[Figures], None]) -> None:
        tokens, rounds = self.scale.bar_tokens, self.rounds
        cases, into = self.scale.host_cases(self.candidates), figures.host
        match part:
            case "products":
                figures.products += measure_products(self.scale.product, self.card, self.say)
                return
            case "memory":
                figures.memory.append(measure_memory(self.scale.models["llama"], tokens, self.card, self.say))
                return
            case "pairs":
                llama = self.scale.models["llama"]
                figures.pairs.append(measure_pairs(llama, tokens, self.card, rounds.rounds, self.say))
                return
            case "host":
                rounds = replace(rounds, rounds=3 * rounds.rounds)  # steps of milliseconds
            case "llama" | "gpt":
                cases, into = self.scale.cases(part, self.candidates), figures.steps
        for case in cases:
            into.append(steps.measure(replace(case, precision=self.precision), self.card, rounds, self.say))
            keep(figures)

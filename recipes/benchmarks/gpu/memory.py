"""Measures the memory of a stage with micro-batches in flight: with its sent outputs freed, and with all of them kept.

A middle stage runs forwards of several micro-batches, as at the start of a schedule, then their backwards. Where the
outputs are freed, each is dropped as soon as it is made, as after a send; a benchmark that holds them shows what they
would take.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_hanayo.pipeline_parallel.batch import Batch
from lightning_hanayo.pipeline_parallel.message import Message, gradient_message
from lightning_hanayo.pipeline_parallel.split_backward import WeightGradientQueue
from recipes.benchmarks.gpu.card import Card
from recipes.benchmarks.gpu.models import Sizes
from recipes.benchmarks.gpu.steps import Say
from recipes.benchmarks.self_contained import SelfContainedFirstStage
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

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def of(plain: Mapping[str, Any]) -> "MemoryFigures":
        """From JSON."""
        return MemoryFigures(**plain)


def measure(sizes: Sizes, tokens: int, card: Card, say: Say) -> MemoryFigures:
    """Run one stage of one GPT block both ways."""
    run = _runner(sizes, tokens, card.device)
    run(False)  # the weights' gradients, and what libraries allocate once
    kept, freed = (card.peak_memory_of(lambda keeps=keeps: run(keeps)) for keeps in (True, False))  # type: ignore[misc]
    element = torch.bfloat16.itemsize
    found = MemoryFigures(sizes.width, tokens, IN_FLIGHT, tokens * sizes.width * element, kept, freed)
    say(f"memory: {IN_FLIGHT} micro-batches of {tokens} tokens in flight: {kept / 2**20:.0f} MB with all sent outputs "
        f"kept, {freed / 2**20:.0f} MB with them freed: {found.saved:.2f} outputs per micro-batch")  # fmt: skip
    return found


def _runner(sizes: Sizes, tokens: int, device: torch.device) -> Callable[[bool], None]:
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

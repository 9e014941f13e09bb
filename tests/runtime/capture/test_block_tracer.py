"""What the block tracer refuses, and that plain values are those of their block.

checkpoint(block, x, use_reentrant=True)      runs the block without gradients, and again in the backward
Reversible.apply(x, block)                    likewise
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.block_tracer import BlockTracer, TracedStack
from lightning_hanayo.schedule import build
from tests.runtime.loopback_pipeline import LoopbackPipeline


class Reversible(torch.autograd.Function):
    """Computes its input from its output in the backward, so that it keeps nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        return x + block(x)


@pytest.mark.parametrize(
    ("within", "said"),
    [
        (lambda block, x: checkpoint(block, x, use_reentrant=True), "CheckpointFunction.*use_reentrant=False"),
        (lambda block, x: Reversible.apply(x, block), "Reversible.* in a block"),
    ],
    ids=["a checkpoint", "a reversible network"],
)
def test_a_block_isnt_called_where_its_gradients_would_be_missing(within: Any, said: str) -> None:
    """As of a pass without gradients."""
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    tracer = BlockTracer(TracedStack(blocks, 1, "blocks"))
    with pytest.raises(UnsupportedError, match=rf"blocks\[0\] .*{said}"):
        within(lambda y: tracer.on_call(blocks[0], (y,), {}), torch.ones(1, 2, requires_grad=True))


class Named(dict[str, Any]):
    """Torch takes it for a leaf, as it isn't a dictionary itself."""


class NumberedLinear(nn.Linear):
    number = 1.0

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        return Named(x=super().forward(x), number=self.number)


class Scaled(nn.Linear):
    def forward(self, x: Tensor, number: float) -> Tensor:  # type: ignore[override]
        return super().forward(x) * number


def test_numbers_in_the_output_of_a_block_are_its_own() -> None:
    """Not those of another block of its class, which is here."""
    blocks: list[nn.Module] = [kind(4, 4) for _ in range(4) for kind in (NumberedLinear, Scaled)]
    for i, block in enumerate(blocks):
        block.number = i + 1.5
    samples = torch.randn(2, 3, 4)

    def step(microbatch: int) -> Tensor:
        x = samples[microbatch]
        for numbered, scaled in zip(blocks[::2], blocks[1::2], strict=True):
            made = numbered(x)
            x = scaled(made["x"], made["number"])
        return x.pow(2).mean()

    expected = [step(microbatch).item() for microbatch in range(2)]
    pipeline = LoopbackPipeline(blocks, build("hanayo", num_ranks=2, num_microbatches=2))
    try:
        assert [result.item() for result in pipeline.run(step, [0.5, 0.5])] == pytest.approx(expected)
    finally:
        pipeline.close()

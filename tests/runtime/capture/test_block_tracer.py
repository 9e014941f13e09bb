"""What the block tracer refuses.

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

"""What the block tracer refuses.

checkpoint(block, x, use_reentrant=True)      runs the block without gradients, and again in the backward
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.block_tracer import BlockTracer


def test_a_block_isnt_called_in_a_reentrant_checkpoint() -> None:
    """Its gradients would be missing, as of a pass without gradients."""
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    tracer = BlockTracer(blocks, 1, "blocks")
    x = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"blocks\[0\] .* use_reentrant=False"):
        checkpoint(lambda y: tracer.on_call(blocks[0], (y,), {}), x, use_reentrant=True)

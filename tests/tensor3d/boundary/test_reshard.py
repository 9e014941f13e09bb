"""What a reshard keeps of one micro-batch for the next ones."""

import torch

from lightning_hanayo.tensor3d.boundary.reshard import ReplicatedReshard, StreamDims
from lightning_hanayo.tensor3d.boundary.sample_shares import Share
from lightning_hanayo.tensor3d.mesh import Mesh


def test_an_index_that_validation_has_made_serves_training() -> None:
    reshard, shares = ReplicatedReshard(Mesh.single(), StreamDims()), [Share(0, 3)]
    x = torch.randn(3, 4, 2, requires_grad=True)
    with torch.inference_mode():
        reshard.stream_out(reshard.stream_in(x.detach(), shares), shares, 4)
    whole = reshard.stream_out(reshard.stream_in(x, shares), shares, 4)
    whole.sum().backward()
    assert torch.equal(whole, x) and torch.equal(x.grad, torch.ones_like(x))

"""A module that runs again in the backward may have buffers of any kind."""

import torch
from torch import Tensor, nn

from lightning_hanayo.pipeline_parallel.graph_boundary import recompute


class Shifted(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("shift", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            self.shift = torch.ones(3)  # as rotary embeddings do
        return super().forward(x) + self.shift


def test_a_buffer_may_have_been_made_in_an_evaluation_in_inference_mode() -> None:
    module, x = Shifted(), torch.ones(2, 3, requires_grad=True)
    with torch.inference_mode():
        module(torch.ones(2, 3))
    expected = module(x)
    recompute([module])
    output = module(x)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert x.grad is not None and torch.equal(x.grad, module.weight.detach().sum(0).expand(2, 3))

"""What transformers records inside blocks on other ranks is there after the stack, at the places that it has there."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_hanayo.pipeline_parallel.capture.carriers import Carriers, RecordedOutputs
from lightning_hanayo.pipeline_parallel.stages import Stage
from lightning_hanayo.schedule import build
from tests.runtime.loopback_pipeline import LoopbackPipeline

NUM_BLOCKS = 5


class Recording(LoopbackPipeline):
    """A pipeline that carries what a model records."""

    def __init__(self, model: nn.Module, blocks: Any) -> None:
        self.carriers: Carriers = (RecordedOutputs(model),)
        super().__init__(blocks, build("hanayo", num_ranks=2, num_microbatches=2))

    def _stages(self) -> list[Stage]:
        stages = super()._stages()
        for one in (self.user, *stages):
            one.carriers = self.carriers
        return stages


@pytest.mark.parametrize("wanted", [True, -1, -2, 1, [0, 3]], ids=str)
def test_hidden_states(wanted: bool | int | list[int]) -> None:
    """All of them, or some: features of a vision tower are those of its last layers but one."""
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=NUM_BLOCKS,
        num_attention_heads=2,
        image_size=4,
        patch_size=2,
    )
    model = transformers.CLIPVisionModel(config)
    images = torch.randn(2, 1, 3, 4, 4, generator=torch.Generator().manual_seed(0))

    def step(microbatch: int) -> Any:
        states = model(images[microbatch], output_hidden_states=wanted).hidden_states
        assert len(states) == NUM_BLOCKS + 1
        return [None if state is None else state.detach() for state in states]

    with torch.no_grad():
        expected = [step(microbatch) for microbatch in range(2)]
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    running = Recording(model, blocks)
    try:
        results = running.run(step, [0.5, 0.5], train=False, context=torch.no_grad)
    finally:
        running.close()
    for found, alone in zip(results, expected, strict=True):
        assert [one is None for one in found] == [one is None for one in alone]
        assert all(torch.equal(one, other) for one, other in zip(found, alone, strict=True) if one is not None)

"""An optimizer that steps in host memory gives the same weights, and has its states there."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning import LightningModule

from lightning_hanayo.errors import PeerFailed, UnsupportedError
from tests.harness import models
from tests.harness.devices import trainer_on
from tests.harness.pool import Pool
from tests.harness.pretended_gpu import pretended_gpu
from tests.harness.staged_groups import staged_groups
from tests.harness.thorough import covered
from tests.harness.training import Layout, assert_bit_equal, data_rank, make_loader, make_strategy, own_weights


def train(device: str, layout: Layout, strategy: dict[str, Any], options: dict[str, Any]) -> Any:
    """This rank's weights, and where its optimizer's states are while it trains."""
    with pretended_gpu() if device == "cuda" else nullcontext(), staged_groups(device):
        trainer = trainer_on(device, layout, strategy=make_strategy(layout, **strategy), max_steps=3, **options)
        module = models.build(models.MLP, torch.bfloat16 if options.get("precision") == "bf16-true" else torch.float32)
        places: set[str] = set()

        def note_places(*_: Any) -> None:
            with trainer.strategy.session.guard.off():
                states = trainer.optimizers[0].state.values()
                places.update(value.device.type for state in states for value in state.values() if value.dim())

        module.on_train_batch_end = note_places
        batches = [
            {
                "x": b["x"][data_rank(layout) :: layout.data].to(module.dtype),
                "y": b["y"][data_rank(layout) :: layout.data],
            }
            for b in models.vectors((8,) * 3)
        ]
        trainer.fit(module, make_loader(batches))
        return {name: value.cpu() for name, value in own_weights(module, trainer).items()}, places


CASES: list[tuple[Layout, dict[str, Any], dict[str, Any]]] = [
    (Layout(waves=2), {}, {"gradient_clip_val": 0.1}),
    (Layout(data=2), {"shard_optimizer": True}, {}),
    (Layout(2, 1, 2), {"shard_optimizer": True, "master_weights": "fp32"}, {"precision": "bf16-true"}),
    (Layout(waves=2), {"master_weights": "fp32"}, {"precision": "bf16-true", "accumulate_grad_batches": 2}),
    (Layout(cube=(2, 1, 1)), {}, {}),
]


@pytest.mark.parametrize(("layout", "strategy", "options"), covered(CASES, by=CASES[:1]), ids=str)
def test_bit_equal(pool: Pool, layout: Layout, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    offloaded = pool.run(layout.world_size, train, "cuda", layout, strategy | {"offload_optimizer": True}, options)
    on_device = pool.run(layout.world_size, train, "cuda", layout, strategy, options)
    for (ours, in_host_memory), (expected, on_gpu) in zip(offloaded, on_device, strict=True):
        assert_bit_equal(ours, expected)
        assert in_host_memory == {"cpu"} and on_gpu == {"cuda"}


class Fused(models.MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class Second(models.MLP):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(("model", "message"), [(Fused, "fused=True reads flags"), (Second, "used with LBFGS")])
def test_what_cant_step_there_is_refused(model: type[LightningModule], message: str) -> None:
    trainer = trainer_on("cpu", Layout(), strategy=make_strategy(Layout(), offload_optimizer=True), max_steps=1)
    with pytest.raises((UnsupportedError, PeerFailed), match=message):
        trainer.fit(models.build(model), make_loader(models.vectors((8,))))

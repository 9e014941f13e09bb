"""Callbacks that freeze and unfreeze parameters train on each layout as in one process."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    assert_close,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    own_weights,
)

LAYOUTS = {
    "one rank": Layout(1, 1, 1),
    "pipeline": Layout(2, 1, 1),
    "waves": Layout(2, 2, 1),
    "split backward": Layout(2, 1, 1, "zbv"),
    "data": Layout(2, 1, 2),
    "cube": Layout(1, 1, 1, cube=(1, 2, 1)),
    "cube and pipeline": Layout(2, 1, 1, cube=(1, 2, 1)),
}
Groups = list[tuple[int, float]]
"""the number of parameters and the learning rate of each param group"""


class Backbone(models.MLP):
    """Trains at first what callbacks leave; its own norm has the values of those in the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(models.WIDTH)

    @property
    def backbone(self) -> nn.Module:
        return self.blocks

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class Upwards(BaseFinetuning):
    """Unfreezes half of the blocks at a time, the last ones first; the embedding stays frozen."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.embedding, module.blocks])

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.blocks[4:], optimizer)
        if epoch == 2:
            self.unfreeze_and_add_param_group(module.blocks[:4], optimizer, lr=0.01)


class AtOnce(Upwards):
    """Unfreezes all blocks before the first batch: Lightning leaves out the norms, which equal the module's."""

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 0:
            self.unfreeze_and_add_param_group(module.blocks, optimizer)


CALLBACKS: dict[str, Callable[[], Any]] = {
    "a backbone": lambda: BackboneFinetuning(1, lambda epoch: 1.5),
    "upwards": Upwards,
    "equal values": AtOnce,
}


def train(name: str, layout: Layout | None, folder: Path | None = None, start: Path | None = None) -> Any:
    """Train three epochs; None: with a plain Trainer. Returns this rank's parameters, and the param groups."""
    warnings.filterwarnings("ignore", message=".*params to be frozen already exist")
    warnings.filterwarnings(
        "ignore", message=".*does not have many workers|.*exists and is not empty|.*no `val_data|.*need to be provided"
    )
    savers = [ModelCheckpoint(folder, "{epoch}", save_top_k=-1)] if folder else []
    callbacks = [CALLBACKS[name](), *savers]
    options = {"callbacks": callbacks, "max_epochs": 3, "enable_checkpointing": folder is not None}
    rank, batches = (0, 1) if layout is None else (data_rank(layout), layout.data), models.vectors((8, 8, 8))
    own = [{key: value[rank[0] :: rank[1]] for key, value in one.items()} for one in batches]
    strategy = {} if layout is None else {"strategy": make_strategy(layout)}
    trainer = make_trainer(layout or Layout(), **strategy, **options)
    module = models.build(Backbone)
    trainer.fit(module, make_loader(own), ckpt_path=start)
    groups = [(len(group["params"]), group["lr"]) for group in trainer.optimizers[0].param_groups]
    return own_weights(module, trainer), groups


def merged(ranks: list[tuple[dict[str, Tensor], Groups]]) -> tuple[dict[str, Tensor], Groups]:
    """The parameters of all ranks, which must have the same groups."""
    assert all(groups == ranks[0][1] for _, groups in ranks)
    return {name: value for weights, _ in ranks for name, value in weights.items()}, ranks[0][1]


CASES = [(name, layout) for name in CALLBACKS for layout in LAYOUTS]


@pytest.mark.parametrize(("name", "layout"), covered(CASES, by=[("equal values", "pipeline"), ("upwards", "data")]))
def test_frozen_parameters_train_from_the_same_epoch_on(pool: Pool, name: str, layout: str) -> None:
    ((weights, groups),) = pool.run(1, train, name, None)
    found, found_groups = merged(pool.run(LAYOUTS[layout].world_size, train, name, LAYOUTS[layout]))
    assert found_groups == groups
    assert_close(found, weights, 1e-6)


def test_norms_with_the_values_of_trained_ones_stay_frozen(pool: Pool) -> None:
    for _, groups in pool.run(2, train, "equal values", LAYOUTS["pipeline"]):
        assert [number for number, _ in groups] == [4, 8 * 4]


@pytest.mark.thorough
@pytest.mark.parametrize("layout", ["pipeline", "data", "cube"])
def test_a_resumed_run_has_the_same_groups(pool: Pool, tmp_path: Path, layout: str) -> None:
    alone, waves = tmp_path / "alone", tmp_path / "waves"
    pool.run(1, train, "upwards", None, alone)
    pool.run(2, train, "upwards", LAYOUTS["waves"], waves)
    for start in ("epoch=0.ckpt", "epoch=1.ckpt"):
        ((weights, groups),) = pool.run(1, train, "upwards", None, None, alone / start)
        size = LAYOUTS[layout].world_size
        found, found_groups = merged(pool.run(size, train, "upwards", LAYOUTS[layout], None, waves / start))
        assert found_groups == groups
        assert_close(found, weights, 1e-6)

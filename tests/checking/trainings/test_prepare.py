"""A copy of the user's module gets fewer blocks, another precision, and no dropout."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import nn

from lightning_hanayo.checking.case import Case
from lightning_hanayo.checking.trainings import prepare, shrink, switch_dropout_off
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy import HanayoStrategy
from lightning_hanayo.topology import Topology
from tests.harness import models


def case(module: LightningModule, **options: Any) -> Case:
    return Case(module, (), HanayoStrategy().options, Topology(), **options)


@pytest.mark.parametrize("factory", [models.gpt2, models.llama, models.bert], ids=lambda factory: factory.__name__)
def test_a_model_of_transformers_still_runs_with_fewer_blocks(factory: Any) -> None:
    module = prepare(case(factory(), depth=3), whole=True)
    (batch,) = models.texts((2,))
    assert isinstance(module, models.Trained) and module.loss(batch).isfinite()
    config = module.model.config  # type: ignore[union-attr]
    assert config.num_hidden_layers == 3
    assert not any(isinstance(value, list) and len(value) == 8 for value in vars(config).values())


def test_counts_are_corrected_in_the_modules_around_the_stack() -> None:
    module = models.MLP()
    module.num_layers = 8  # type: ignore[assignment]
    module.width = 8  # type: ignore[assignment]
    shrink(module, None, 5)
    assert len(module.blocks) == module.num_layers == 5
    assert module.width == 8


def test_a_depth_is_from_two_to_the_number_of_blocks() -> None:
    for depth in (0, 9):
        with pytest.raises(HanayoError, match=f"depth={depth}: expected 2 to 8, the blocks of blocks"):
            shrink(models.MLP(), None, depth)


def test_the_precision_of_the_module_changes() -> None:
    module = prepare(case(models.MLP(), dtype=torch.float64), whole=True)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float64} and module.dtype == torch.float64


def test_all_dropout_is_switched_off() -> None:
    module: Any = nn.ModuleList([nn.Dropout(0.1), nn.Dropout2d(0.2), nn.Linear(2, 2), nn.MultiheadAttention(4, 2, 0.3)])
    module[2].attention_dropout, module[2].drop_path_prob, module[2].p, module[2].dropout_layers = 0.4, 0.5, 0.6, 2
    module[1].config = module[2].config = SimpleNamespace(dropout=0.1, num_layers=2)
    switch_dropout_off(module)
    assert module[1].config == SimpleNamespace(dropout=0.0, num_layers=2)
    assert (module[0].p, module[1].p, module[3].dropout) == (0.0, 0.0, 0.0)
    assert (module[2].attention_dropout, module[2].drop_path_prob) == (0.0, 0.0)
    assert (module[2].p, module[2].dropout_layers) == (0.6, 2), "they are no probabilities of dropout"


def test_a_module_that_builds_itself_later_is_prepared_then() -> None:
    class Later(models.MLP):
        def __init__(self) -> None:
            LightningModule.__init__(self)

        def configure_model(self) -> None:
            self.blocks = nn.ModuleList(models.Block() for _ in range(8))

    module = prepare(case(Later(), depth=2), whole=True)
    assert not list(module.parameters())
    module.configure_model()
    assert isinstance(module, Later) and len(module.blocks) == 2

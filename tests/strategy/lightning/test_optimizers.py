"""States that optimizers make of guarded parameters are plain tensors; a step leaves the options as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.partial_values import Part, PartialParameter
from lightning_hanayo.partition.guards import Owner, without_values
from lightning_hanayo.strategy.lightning.state import unguard_states
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, make_loader, make_trainer


def test_states_made_of_parts_are_plain() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    vars(parameter)["_part"] = Part("layer.weight", (4, 2))
    parameter.__class__ = PartialParameter
    optimizer = torch.optim.Adagrad([parameter], initial_accumulator_value=0.5)
    parameter.__class__ = nn.Parameter
    unguard_states([optimizer])
    state = optimizer.state[parameter]
    assert type(state["sum"]) is Tensor
    assert state["sum"].tolist() == [[0.5, 0.5], [0.5, 0.5]] and type(state["step"]) is Tensor


def test_states_made_of_placeholders_are_plain_and_have_no_values() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    owner = Owner("layer.weight", 1, torch.device("cpu"))
    optimizer.state[parameter] = {"slow": without_values(parameter, owner), "step": 3}
    unguard_states([optimizer])
    slow = optimizer.state[parameter]["slow"]
    assert type(slow) is Tensor and slow.is_meta and optimizer.state[parameter]["step"] == 3


class SetsRate(models.MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().param_groups[0]["lr"] = 0.1 / (1 + batch_idx)  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)


class Steps(models.MLP):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().step()  # type: ignore[union-attr,call-arg]
        return super().training_step(batch, batch_idx)


def fit_on_a_pipeline(kind: type[models.MLP]) -> None:
    make_trainer(Layout(2), max_epochs=1).fit(models.build(kind), make_loader(models.vectors((8, 8))))


def test_a_rate_that_the_step_sets_on_pipeline_rank_0_alone_is_refused(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="training_step changes an optimizer's options.* on_train_batch_start"):
        pool.run(2, fit_on_a_pipeline, SetsRate)


def test_an_optimizer_that_the_step_steps_on_pipeline_rank_0_alone_is_refused(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="training_step steps an optimizer, but"):
        pool.run(2, fit_on_a_pipeline, Steps, timeout=60.0)

"""A checkpoint's folder holds what a single process saves: the same names, shapes, dtypes and values.

one process    Trainer.save_checkpoint    ----->  alone.ckpt, a file
a layout       Trainer.save_checkpoint    ----->  folder.ckpt/, put together from its parts
"""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import models
from tests.harness.checkpoints import read
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, data_rank, make_loader, make_trainer

TRAININGS = {
    "mlp": Training(models.MLP, partial(models.vectors, (8, 8)), torch.float64),
    "tied gpt": Training(models.gpt, partial(models.windows, (8, 8)), torch.float64),
}
ALONE = Layout()
LAYOUTS = [
    Layout(2, 2),
    Layout(2, 1, 2),
    Layout(2, 1, cube=(1, 2, 1)),
    Layout(1, 1, 2, cube=(2, 1, 1)),
    Layout(1, cube=(2, 2, 1)),
    Layout(4, 1, schedule="1f1b"),
]
TOLERANCE = 1e-10


def save(training: Training, layout: Layout, path: Path) -> None:
    """Train an epoch, then save after `fit`."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")  # the recipe's model has a validation_step
    trainer = make_trainer(layout, training.loss_weight, max_epochs=1)
    loader = make_loader(training.share(data_rank(layout), layout.data))
    trainer.fit(models.build(training.model, training.dtype), loader)
    trainer.save_checkpoint(path)


def by_name(checkpoint: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A single process's checkpoint with names instead of numbers of parameters."""
    for state in checkpoint["optimizer_states"]:
        state["state"] = {names[index]: values for index, values in state["state"].items()}
        for group in state["param_groups"]:
            group["params"] = [names[index] for index in group["params"]]
    return checkpoint


def names_in_optimizer(module: Any) -> list[str]:
    """The names of the parameters in the optimizer's order."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    made: Any = module.configure_optimizers()
    optimizer = made if isinstance(made, torch.optim.Optimizer) else made[0][0]
    return [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]


def assert_same(actual: Any, expected: Any, where: str = "checkpoint") -> None:
    """Both have the same structure, and the same numbers within the tolerance."""
    if isinstance(expected, dict):
        assert sorted(map(str, actual)) == sorted(map(str, expected)), where
        for key, value in expected.items():
            assert_same(actual[key], value, f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{where}[{index}]")
    elif isinstance(expected, Tensor):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), where
        assert torch.allclose(actual, expected, rtol=0, atol=TOLERANCE), where
    else:
        assert actual == expected and type(actual) is type(expected), where


@pytest.fixture(scope="module")
def files(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one process saves."""
    path = tmp_path_factory.mktemp("alone") / "alone.ckpt"
    found = {}
    for kind, training in TRAININGS.items():
        pool.run(1, save, training, ALONE, path)
        found[kind] = by_name(read(path), names_in_optimizer(training.model()))
    return found


COVER = [("mlp", LAYOUTS[1]), ("tied gpt", LAYOUTS[2])]


@pytest.mark.parametrize(
    ("kind", "layout"), covered(((kind, layout) for kind in TRAININGS for layout in LAYOUTS), by=COVER), ids=str
)
def test_a_folder_holds_what_one_process_saves(
    pool: Pool, tmp_path: Path, files: dict[str, dict[str, Any]], kind: str, layout: Layout
) -> None:
    pool.run(layout.world_size, save, TRAININGS[kind], layout, tmp_path / "folder.ckpt")
    found = read(tmp_path / "folder.ckpt")
    assert list(found["state_dict"]) == list(files[kind]["state_dict"])
    assert_same(found, files[kind])

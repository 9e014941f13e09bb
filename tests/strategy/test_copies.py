"""The module may be copied, pickled and saved while it trains; its copies know no process group.

The Trainer may be copied and pickled before and after a run, as a plain one may, and its copies train.
"""

import copy
import io
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import DoublePrecision

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import UnsupportedError
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    assert_bit_equal,
    assert_close,
    make_loader,
    make_strategy,
    make_trainer,
    merge_owned,
    own_weights,
)


class Copies(Callback):
    """What a hand-written EMA or a debugging callback does."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        twin = copy.deepcopy(module)
        assert [p.is_meta for p in twin.parameters()] == [p.is_meta for p in module.parameters()]
        pickle.loads(pickle.dumps(module))
        with pytest.raises(UnsupportedError, match=r"is on pipeline rank ., .*torch.save"):
            torch.save(module, io.BytesIO())


def train(model: type[LightningModule]) -> None:
    trainer = make_trainer(Layout(2, 1, 1), max_steps=2, callbacks=[Copies()])
    loaders = [make_loader(models.vectors((8, 8))) for _ in range(2 if model is models.Metrics else 1)]
    trainer.fit(models.build(model), *loaders)


@pytest.mark.parametrize("model", [models.MLP, models.Metrics])
def test_copied_while_it_trains(pool: Pool, model: type[LightningModule]) -> None:
    pool.run(2, train, model)


def by_pickle(trainer: Trainer) -> Trainer:
    return pickle.loads(pickle.dumps(trainer))  # type: ignore[no-any-return]


def by_cloudpickle(trainer: Trainer) -> Trainer:
    import cloudpickle

    return pickle.loads(cloudpickle.dumps(trainer))  # type: ignore[no-any-return]


COPIES = [by_pickle, copy.deepcopy, *([by_cloudpickle] if find_spec("cloudpickle") else [])]


class Own(DoublePrecision):
    """A user's plugin."""


def copied(layout: Layout, strategy: Callable[[], Any], copied_by: Callable[[Trainer], Trainer]) -> list[Any]:
    """Weights after an epoch of a copied Trainer, after another one of its own copy, and of that with another model."""
    options = {"strategy": strategy(), "gradient_clip_val": 0.1, "plugins": [Own()]}
    loader, weights = make_loader(models.vectors((8, 8))), []
    trainer = copied_by(make_trainer(layout, max_epochs=1, **options))
    trainer.fit(models.build(models.MLP), loader)
    weights.append(own_weights(trainer.lightning_module))
    for epochs, module in ((2, None), (3, models.build(models.Skip))):
        trainer = copied_by(trainer)
        assert type(trainer.precision_plugin) is Own
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(module or trainer.lightning_module, loader)
        weights.append(own_weights(trainer.lightning_module))
    return weights


@pytest.mark.parametrize("copied_by", covered(COPIES, by=COPIES[:1]))
@pytest.mark.parametrize(
    "layout",
    [Layout(2, 1, 1), pytest.param(Layout(2, 2, 1), id="by name", marks=pytest.mark.thorough)],
    ids=str,
)
def test_a_copied_trainer_trains(pool: Pool, layout: Layout, copied_by: Callable[[Trainer], Trainer]) -> None:
    strategy: Any = partial(str, "hanayo") if layout.waves == 2 else partial(make_strategy, layout)
    (alone,) = pool.run(1, copied, Layout(), partial(str, "auto"), copied_by)
    ranks = pool.run(2, copied, layout, strategy, copied_by)
    for turn, expected in enumerate(alone):
        assert_close(merge_owned([rank[turn] for rank in ranks]), expected, 1e-10)


def test_a_strategy_by_itself() -> None:
    strategy = pickle.loads(pickle.dumps(HanayoStrategy(num_waves=2, cube=2)))
    assert (strategy.options.num_waves, strategy.options.cube) == (2, 2)


def test_processes_stay_with_the_launcher_that_started_them() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="hanayo", logger=False, enable_checkpointing=False)
    launcher: Any = trainer.strategy.launcher
    launcher.procs = [subprocess.Popen([sys.executable, "-c", ""])]
    for twin in (pickle.loads(pickle.dumps(launcher)), copy.deepcopy(launcher)):
        assert twin.procs == [] and twin.num_processes == 2
    assert launcher.procs[0].wait() == 0


CUBE = Layout(cube=(1, 2, 1))


def trained_in_a_cube() -> tuple[Trainer, LightningModule]:
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")  # the recipe's model could validate
    trainer, module = make_trainer(CUBE, max_steps=1), models.build(models.gpt)
    trainer.fit(module, make_loader(models.windows((8,))))
    return trainer, module


def pickled_in_a_cube() -> str:
    trainer, module = trained_in_a_cube()
    copied = pickle.loads(pickle.dumps(trainer))
    assert_bit_equal(own_weights(copied.lightning_module), own_weights(module))
    with pytest.raises(UnsupportedError, match="this rank holds a part"):
        copied.lightning_module.state_dict()
    with pytest.raises(UnsupportedError, match="3-D layers was called, but its run has ended") as caught:
        copied.lightning_module.blocks[0](torch.zeros(1, 4, models.WIDTH))
    return str(caught.value)


def test_a_copy_from_a_cube_has_values_and_no_ranks(pool: Pool) -> None:
    assert len(pool.run(2, pickled_in_a_cube)) == 2


def trained_as_a_copy() -> None:
    _, module = trained_in_a_cube()
    make_trainer(CUBE, max_steps=1).fit(copy.deepcopy(module), make_loader(models.windows((8,))))


def test_a_copy_from_a_cube_isnt_trained(pool: Pool) -> None:
    with pytest.raises(RunFailed, match="is a copy of one that"):
        pool.run(2, trained_as_a_copy)

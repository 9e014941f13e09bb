"""The module may be copied, pickled and saved while it trains; its copies know no process group."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer

from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.running import Layout, make_loader, make_trainer


class Copies(Callback):
    """What a hand-written EMA or a debugging callback does."""

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        twin = copy.deepcopy(module)
        assert [p.is_meta for p in twin.parameters()] == [p.is_meta for p in module.parameters()]
        pickle.loads(pickle.dumps(module))
        torch.save(module, io.BytesIO())


def train(model: type[LightningModule]) -> None:
    trainer = make_trainer(Layout(2, 1, 1), max_steps=2, callbacks=[Copies()])
    loaders = [make_loader(models.vectors((8, 8))) for _ in range(2 if model is models.Metrics else 1)]
    trainer.fit(models.build(model), *loaders)


@pytest.mark.parametrize("model", [models.MLP, models.Metrics])
def test_copied_while_it_trains(pool: Pool, model: type[LightningModule]) -> None:
    pool.run(2, train, model)

"""In a step the host never waits for the device, but where the guide says so.

step      1     2     3     4     5
                    |  recorded |        what would be copied from a GPU to the host, or to it with a wait

`ALLOWED` are the functions that the table of the guide names.
"""

import re
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.nn import functional

from tests.harness import models
from tests.harness.host_syncs import HostSyncs
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, data_rank, make_loader, make_strategy, make_trainer

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "gpu.md"
ALLOWED = set(re.findall(r"`(\w[\w/]*\.py:\w+)`", GUIDE.read_text(encoding="utf-8")))
ON_CPUS_ONLY = {"pipeline_parallel/grad_sync.py:_check", "pipeline_parallel/grad_sync.py:apply"}
"""they read a factor where it is in host memory, and don't where it is on a device"""


NUM_RECORDED = 4
"""batches"""


class Recording(Callback):
    """Records the batches of steps 3 and 4, when all that is learnt from the first ones is known."""

    def __init__(self, syncs: HostSyncs) -> None:
        self._syncs = syncs

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        session: Any = trainer.strategy.session  # type: ignore[attr-defined]
        with session.guard.off():
            self._syncs.put_on_device([*pl_module.parameters(), *pl_module.buffers()])

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.strategy.pipe_rank == 0:  # type: ignore[attr-defined]
            self._syncs.put_on_device(list(batch.values()))
        self._syncs.is_on = 4 <= batch_idx < 4 + NUM_RECORDED


Recording.on_train_batch_start.__module__ = "lightning.pytorch"  # for a user's hook more would be sent, and waited for


def recorded(training: Training, layout: Layout, folder: str) -> Counter[str]:
    """Where this rank would wait, as file and function, and how often."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")  # the recipe's model has a validation_step
    syncs = HostSyncs()
    with syncs.watching():
        trainer = make_trainer(
            layout,
            strategy=make_strategy(layout, loss_weight=training.loss_weight),
            max_steps=training.steps,
            accumulate_grad_batches=training.accumulate,
            gradient_clip_val=training.clip,
            callbacks=[Recording(syncs)],
            logger=CSVLogger(folder),
            log_every_n_steps=1,
        )
        trainer.fit(models.build(training.model), make_loader(training.share(data_rank(layout), layout.data)))
    places = Counter[str]()
    for place, count in syncs.places.items():
        places[place.split()[0]] += count
    return places


class Reports(models.MLP):
    """Returns numbers beside the loss, logs three, and collects losses."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = functional.cross_entropy(self(batch["x"]), batch["y"], reduction="sum")
        accuracy = loss.detach() / 3
        self.outputs.append(loss.detach())
        self.log_dict({"loss": loss, "accuracy": accuracy, "other": accuracy + 1})
        return {"loss": loss, "accuracy": accuracy}


class ReportsSamples(Reports):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {name: one / 8 for name, one in super().training_step(batch, batch_idx).items()}


GPT = partial(models.gpt, 2, 2)
VECTORS, TEXTS = partial(models.vectors, (8,) * 10), partial(models.texts, (8,) * 10)
RUNS = {
    "waves-on-one-rank": (models.MLP, VECTORS, Layout(1, 2)),
    "tied": (models.SharesOutside, VECTORS, Layout(2, 2)),
    "data": (models.MLP, VECTORS, Layout(2, 1, data=2)),
    "cube": (GPT, TEXTS, Layout(1, 1, cube=(1, 2, 1))),
    "generic-cube-in-pipeline": (models.SharesOutside, VECTORS, Layout(2, 1, cube=(1, 2, 1))),
    "reports": (Reports, VECTORS, Layout(1, 2)),
    "reports-samples": (ReportsSamples, VECTORS, Layout(1, 2)),
    "replicating-cube": (GPT, TEXTS, Layout(1, 1, cube=(1, 2, 1), outside="replicate")),
}


@pytest.mark.parametrize("name", covered(RUNS, by={"tied", "reports"}))
def test_the_host_waits_only_where_the_guide_says_so(pool: Pool, tmp_path: Path, name: str) -> None:
    model, batches, layout = RUNS[name]
    rule: Any = "tokens" if batches is TEXTS else "sum" if model is Reports else "samples"
    training = Training(model, batches, steps=5, accumulate=2, clip=0.5, loss_weight=rule)
    counts: list[Counter[str]] = pool.run(layout.world_size, recorded, training, layout, str(tmp_path))
    assert all(of_rank["pipeline_parallel/batches/merge.py:__call__"] <= NUM_RECORDED for of_rank in counts)
    places = set().union(*counts)
    assert places - ON_CPUS_ONLY <= ALLOWED
    assert places & ALLOWED, "the recorder sees what is allowed"

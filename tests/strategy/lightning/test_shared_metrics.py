"""Step metrics travel only at steps whose end somebody reads.

                       nobody reads   a checkpoint every 2 steps   a user's callback
values per 4 batches        4                 4 + 2                    4 + 4 x 2      the batch, the loss with all
                                                                                      metrics, values for the hook

and one in the first batch: how many samples it has.
"""

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_hanayo.pipeline_parallel.transport import Relay
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, make_loader, make_trainer


class Reader(Callback):
    """Looks at the ends of batches, at what is to be known everywhere."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(outputs["loss"], trainer.callback_metrics["train_loss"])
        self.losses.append(float(outputs["loss"]))


def count(kind: str) -> tuple[int, list[float]]:
    """How many values came down the chain while four batches trained, and the losses a callback saw."""
    shared = 0
    share = Relay.broadcast

    def counted(self: Relay, kind: Any, value: Any = None) -> Any:
        nonlocal shared
        shared += kind not in ("pass", "random")  # an epoch has two passes; random states are shared for other hooks
        return share(self, kind, value)

    reader = Reader()
    saving = ModelCheckpoint("checkpoints", every_n_train_steps=2, monitor="train_loss")
    callbacks = {"nobody": [], "checkpoint": [saving], "callback": [reader]}[kind]
    trainer = make_trainer(Layout(2, 1, 1), max_steps=4, callbacks=callbacks, enable_checkpointing=kind == "checkpoint")
    before_epoch_end = []

    class Watch(models.MLP):
        def on_train_epoch_end(self) -> None:
            before_epoch_end.append(shared - 2)  # the end of the epoch has shared metrics and collected values by now

    Relay.broadcast = counted  # type: ignore[method-assign]
    try:
        trainer.fit(models.build(Watch), make_loader(models.vectors((8, 8, 8, 8))))
    finally:
        Relay.broadcast = share  # type: ignore[method-assign]
    return before_epoch_end[0], reader.losses


@pytest.mark.parametrize(
    ("kind", "expected"),
    covered(
        [("nobody", 5), ("checkpoint", 5 + 2), ("callback", 5 + 4 * 2)], by=[("nobody", 5), ("callback", 5 + 4 * 2)]
    ),
)
def test_only_where_somebody_reads(pool: Pool, kind: str, expected: int) -> None:
    (first, first_losses), (second, second_losses) = pool.run(2, count, kind)
    assert (first, second) == (expected, expected)
    assert first_losses == second_losses and len(first_losses) == (4 if kind == "callback" else 0)

"""A run that goes on on another layout ends like one process that was never interrupted, optimizer states included.

epoch 1                epoch 2
one layout  -- save -> another layout     in fp64, so that only the order of sums differs
"""

import warnings
from pathlib import Path

import pytest
from torch import Tensor

from tests.equivalence.test_checkpoints import TOLERANCE, TRAININGS, Saver
from tests.harness import models
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import (
    Layout,
    Outcome,
    Training,
    assert_close,
    data_rank,
    make_loader,
    make_strategy,
    make_trainer,
    merge,
)

ONE = Layout()
WAVE = Layout(2, 2, 1)
WAVE_CUBE = Layout(2, 1, 1, cube=(1, 2, 1))
PAIRS = [
    (ONE, WAVE),
    (WAVE, ONE),
    (WAVE, Layout(4, 1, 1, "1f1b")),
    (WAVE, WAVE_CUBE),
    (WAVE_CUBE, Layout(3, 1, 1)),
    (Layout(2, 1, 2), Layout(1, cube=(2, 2, 1))),
    (Layout(1, cube=(1, 1, 2)), Layout(2, 1, 2)),
    (Layout(4, 1, 1), Layout(1, 1, 4)),
]


def train(training: Training, layout: Layout, epochs: int, path: Path, start: Path | None = None) -> Outcome:
    """Train to the end of an epoch, then save; with the strategy also in one process."""
    warnings.filterwarnings("ignore", message=".*no `val_dataloader`")  # the recipe's model has a validation_step
    saver = Saver(path)
    strategy = make_strategy(layout, loss_weight=training.loss_weight)
    trainer = make_trainer(layout, max_epochs=epochs, callbacks=[saver], strategy=strategy)
    loader = make_loader(training.share(data_rank(layout), layout.data))
    trainer.fit(models.build(training.model, training.dtype), loader, ckpt_path=start)
    return saver.outcome


@pytest.fixture(scope="module")
def uninterrupted(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """The weights of one process after two epochs."""
    path = tmp_path_factory.mktemp("uninterrupted") / "full.ckpt"
    return {kind: pool.run(1, train, one, ONE, 2, path)[0].weights for kind, one in TRAININGS.items()}


@pytest.mark.parametrize(
    ("kind", "writer", "reader"), covered(((kind, *pair) for kind in TRAININGS for pair in PAIRS), by=[]), ids=str
)
def test_every_layout_reads_the_checkpoints_of_every_other(
    pool: Pool, tmp_path: Path, uninterrupted: dict[str, dict[str, Tensor]], kind: str, writer: Layout, reader: Layout
) -> None:
    training, half = TRAININGS[kind], tmp_path / "half.ckpt"
    pool.run(writer.world_size, train, training, writer, 1, half)
    ranks = pool.run(reader.world_size, train, training, reader, 2, tmp_path / "full.ckpt", half)
    assert_close(merge(ranks, reader).weights, uninterrupted[kind], TOLERANCE)

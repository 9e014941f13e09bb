"""A run that is resumed on another layout goes on as the one that was not interrupted, within rounding errors.

            epoch 0          epochs 1, 2: 10 steps
written     P = 2, W = 2     P = 2, W = 2               the expected losses and weights
read                         P = 4, 1F1B                the same to 1e-6, dropout included
"""

import logging
import logging.handlers
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from lightning import Callback
from torch import Tensor
from torch.utils.data import DataLoader

from tests.equivalence.test_resume import Dropping
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import Layout, data_rank, make_strategy, make_trainer, own_weights

SAMPLES, BATCH = 40, 4
WAVES, LINE, ONE = Layout(2, 2, 1), Layout(4, 1, 1, "1f1b"), Layout(1)
CUBE, DATA = Layout(1, 1, 1, cube=(1, 2, 1)), Layout(1, 1, 2)


@dataclass
class Run:
    """How one rank trains."""

    layout: Layout
    model: Any = models.MLP
    batch: int = BATCH
    accumulate: int = 1
    shuffle: bool = True
    stop: int = -1
    """the batch after which it is saved; -1: at the end of epoch 0"""
    options: dict[str, Any] | None = None


class Watch(Callback):
    """Saves, and notes the accumulation and the weights at the end."""

    def __init__(self, path: Path, stop: int) -> None:
        self.path, self.stop = path, stop
        self.weights: dict[str, Tensor] = {}
        self.accumulate = 0
        self.steps = 0
        self.lines: list[str] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.stop:
            trainer.save_checkpoint(self.path)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if self.stop < 0 and trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.weights, self.accumulate = own_weights(module, trainer), trainer.accumulate_grad_batches
        self.steps = trainer.global_step


def fit(run: Run, path: Path, resume: bool) -> Watch:
    for message in (".*does not have many workers", ".*dataloader is not resumable", ".*no `val_dataloader`"):
        warnings.filterwarnings("ignore", message=message)
    watch = Watch(path, -2 if resume else run.stop)
    strategy = make_strategy(run.layout, **(run.options or {}))
    trainer = make_trainer(
        run.layout, strategy=strategy, callbacks=[watch], max_epochs=3, accumulate_grad_batches=run.accumulate
    )
    whole = models.vectors((SAMPLES,))[0]
    mine = [
        {name: value[i] for name, value in whole.items()}
        for i in range(data_rank(run.layout), SAMPLES, run.layout.data)
    ]
    loader = DataLoader(mine, batch_size=run.batch, shuffle=run.shuffle)  # type: ignore[arg-type]
    torch.manual_seed(3 + resume)
    handler = logging.handlers.QueueHandler(queue := SimpleQueue())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    trainer.fit(models.build(run.model), loader, ckpt_path=path if resume else None)
    logger.removeHandler(handler)
    while not queue.empty():
        watch.lines.append(queue.get().getMessage())
    return watch


def save(pool: Pool, run: Run, path: Path) -> list[Watch]:
    found: list[Watch] = pool.run(run.layout.world_size, fit, run, path, False)
    return found


def resume(pool: Pool, run: Run, path: Path) -> list[Watch]:
    found: list[Watch] = pool.run(run.layout.world_size, fit, run, path, True)
    return found


def weights_of(watches: list[Watch]) -> dict[str, Tensor]:
    return {name: value for watch in watches for name, value in watch.weights.items()}


PAIRS = [(WAVES, LINE), (LINE, ONE), (ONE, WAVES)]
CUBES = [(WAVES, CUBE), (CUBE, WAVES)]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "writer", "reader"),
    [*((Dropping, *pair) for pair in PAIRS), *((models.MLP, *pair) for pair in CUBES)],
    ids=str,
)
def test_another_layout_agrees_within_rounding_errors(
    pool: Pool, tmp_path: Path, model: Any, writer: Layout, reader: Layout
) -> None:
    path = tmp_path / "saved.ckpt"
    expected = weights_of(save(pool, Run(writer, model), path))
    actual = weights_of(resume(pool, Run(reader, model), path))
    assert actual.keys() == expected.keys()
    assert all(torch.allclose(actual[name], value, rtol=0, atol=1e-6) for name, value in expected.items())


@pytest.mark.parametrize("batch", covered([BATCH, 2 * BATCH], by=[BATCH]))
def test_half_the_data_ranks_accumulate_twice_as_much(pool: Pool, tmp_path: Path, batch: int) -> None:
    """Or have twice the batch: then nothing is scaled."""
    path = tmp_path / "saved.ckpt"
    written = save(pool, Run(DATA, shuffle=False), path)
    (read,) = resume(pool, Run(ONE, batch=batch, shuffle=False), path)
    assert read.accumulate == 2 * BATCH // batch
    assert read.steps == written[0].steps == 15
    expected = weights_of(written[:1])
    assert all(torch.allclose(read.weights[name], value, rtol=0, atol=1e-6) for name, value in expected.items())


@pytest.mark.thorough
def test_half_the_data_ranks_go_on_in_mid_epoch(pool: Pool, tmp_path: Path) -> None:
    """The batches of the epoch so far count twice, and so many steps are left as before."""
    path = tmp_path / "saved.ckpt"
    written = save(pool, Run(DATA, shuffle=False, stop=2), path)
    (read,) = resume(pool, Run(ONE, shuffle=False), path)
    assert (read.accumulate, read.steps) == (2, written[0].steps)
    assert any("3 batches of 4 samples on 2 data ranks count as 6 of 4 on 1" in line for line in read.lines)


def test_what_cannot_be_reproduced_is_said_once_on_rank_0(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    save(pool, Run(ONE, stop=6, accumulate=2), path)
    first, second = resume(pool, Run(Layout(2), accumulate=2), path)
    lines = [line for line in first.lines if line.startswith("Resuming: ")]
    expected = (
        "values are added up in another order",
        "7 batches of the epoch",
        "the training loader has no state_dict",
    )
    assert len(lines) == len(expected)
    assert all(text in line for text, line in zip(expected, lines, strict=True))
    assert not any(line.startswith("Resuming: ") for line in second.lines)


REFUSED = {
    "another accumulation": (Run(ONE, accumulate=3), "took 4 x 1 data ranks x 1 accumulated batches = 4 samples"),
    "a batch that no accumulation makes up for": (Run(ONE, batch=3), "another batch size"),
    "another number of data ranks in mid-epoch": (Run(DATA), "in the middle of an epoch, after 7 batches of 4 samples"),
}


@pytest.mark.parametrize("name", covered(REFUSED, by=[]))
def test_other_steps_are_refused_before_the_first_batch(pool: Pool, tmp_path: Path, name: str) -> None:
    run, message = REFUSED[name]
    path = tmp_path / "saved.ckpt"
    save(pool, Run(ONE, stop=6 if "mid-epoch" in name else -1), path)
    with pytest.raises(RunFailed, match=re.escape(message)) as caught:
        resume(pool, run, path)
    assert "load_anyway=('samples',)" in str(caught.value)
    run.options = {"load_anyway": ("samples",)}
    assert resume(pool, run, path)[0].weights


@pytest.mark.thorough
def test_gradients_that_another_accumulation_has_no_use_for_are_named(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "saved.ckpt"
    save(pool, Run(ONE, accumulate=2, stop=4), path)
    [watch] = resume(pool, Run(ONE, accumulate=3, options={"load_anyway": ("samples",)}), path)
    dropped = "Resuming: accumulate_grad_batches was 2, and is 3: gradients since the last step are left out."
    assert dropped in watch.lines

"""Runs that are started again resume from their newest checkpoint; new runs in the same folder don't."""

import itertools
import logging
import logging.handlers
import os
import warnings
from pathlib import Path
from queue import SimpleQueue

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hanayo.strategy import restarts
from tests.harness import models
from tests.harness.pool import Pool, RunFailed
from tests.harness.training import Layout, make_strategy, make_trainer

LINE = Layout(pipe=2, num_microbatches=2)
NUM_BATCHES, BATCH = 8, 4


class Start(Callback):
    """Notes after which step the training starts."""

    step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.step = trainer.global_step


def fit(
    folder: Path, version: str, variables: dict[str, str], max_steps: int, ckpt_path: str | None = None
) -> tuple[int, list[str]]:
    """Train on one of torchrun's ranks; returns the step at the start, and what was said of restarts."""
    warnings.simplefilter("ignore")
    os.environ |= variables | {"TORCHELASTIC_RUN_ID": "none"}
    restarts._fits = itertools.count()  # as in a new process
    start = Start()
    saves = ModelCheckpoint(folder / version, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = make_trainer(
        LINE,
        strategy=make_strategy(LINE),
        callbacks=[start, saves],
        max_steps=max_steps,
        enable_checkpointing=True,
        default_root_dir=str(folder),
    )
    whole = models.vectors((NUM_BATCHES * BATCH,))[0]
    samples = [{name: value[i] for name, value in whole.items()} for i in range(NUM_BATCHES * BATCH)]
    handler = logging.handlers.QueueHandler(queue := SimpleQueue())
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)  # a test before may have made Lightning quiet
    trainer.fit(models.build(models.MLP), DataLoader(samples, batch_size=BATCH), ckpt_path=ckpt_path)  # type: ignore[arg-type]
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    lines = []
    while not queue.empty():
        lines.append(queue.get().getMessage())
    return start.step, [line for line in lines if line.startswith("Restart: ")]


def agent(name: str, restart: int = 0) -> dict[str, str]:
    """The variables of one that torchrun has on this node."""
    return {
        "TORCHELASTIC_ERROR_FILE": f"/agents/{name}/attempt_{restart}/0/error.json",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
    }


def run(
    pool: Pool, folder: Path, version: str, variables: dict[str, str], max_steps: int, ckpt_path: str | None = None
) -> tuple[int, list[str]]:
    """Train on two ranks, which start at the same step; what rank 0 has said."""
    (step, lines), (other, _) = pool.run(2, fit, folder, version, variables, max_steps, ckpt_path)
    assert other == step
    return step, lines


def flip_a_byte(folder: Path) -> None:
    path = next(folder.glob("model*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_restart_resumes_from_the_newest_checkpoint_in_another_folder(pool: Pool, tmp_path: Path) -> None:
    assert run(pool, tmp_path, "version_0", agent("a"), max_steps=4) == (0, [])
    flip_a_byte(tmp_path / "version_0" / "step=4.ckpt")
    step, lines = run(pool, tmp_path, "version_1", agent("a", restart=1), max_steps=6)
    assert step == 2
    assert f"resumes from {tmp_path}/version_0/step=2.ckpt, saved after step 2" in lines[-1]


@pytest.mark.thorough
def test_a_new_start_resumes_nothing_and_has_a_record_of_its_own(pool: Pool, tmp_path: Path) -> None:
    run(pool, tmp_path, "version_0", agent("a"), max_steps=4)
    assert run(pool, tmp_path, "version_0", agent("b"), max_steps=2) == (0, [])
    step, _ = run(pool, tmp_path, "version_1", agent("b", restart=1), max_steps=6)
    assert step == 2


@pytest.mark.thorough
def test_the_given_checkpoint_counts_until_the_run_has_saved_one(pool: Pool, tmp_path: Path) -> None:
    run(pool, tmp_path, "version_0", agent("a"), max_steps=4)
    given = str(tmp_path / "version_0" / "step=2.ckpt")
    step, lines = run(pool, tmp_path, "version_1", agent("b", restart=1), 3, given)
    assert (step, lines) == (
        2,
        [f"Restart: the run has saved no checkpoint so far, and starts from the given checkpoint, {given}"],
    )
    run(pool, tmp_path, "version_2", agent("c"), 6, given)
    assert run(pool, tmp_path, "version_3", agent("c", restart=1), 7, given)[0] == 6


def read_on_one_node(folder: Path, max_steps: int) -> tuple[int, list[str]]:
    """As on a node that has another folder of the same name than rank 0's."""
    own = folder / os.environ["RANK"]
    return fit(own, "version_0", agent("a", restart=1), max_steps)


@pytest.mark.thorough
def test_a_record_that_rank_0_does_not_see_is_refused(pool: Pool, tmp_path: Path) -> None:
    run(pool, tmp_path / "1", "version_0", agent("a"), max_steps=2)
    with pytest.raises(RunFailed, match="rank 1 finds .*torchrun-none.json.* rank 0 doesn't"):
        pool.run(2, read_on_one_node, tmp_path, 4)

"""A signal to any rank: all ranks stop after the same batch, save together, and the resumed run is the undisturbed one.

                 batches   0 1 2 3 4 | 5 6 7 8 9 | ...
undisturbed                x x x x x | x x x x x | x x x x x
stopped             signal           |   ^ stops after 6 or 7, on all ranks
resumed                              |     x x x | x x x x x       weights and losses from there on are the same
"""

import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import seed_everything
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_hanayo.strategy.stopping import CHECKPOINT_NAME
from tests.equivalence.test_resume import (
    NUM_BATCHES,
    SIZE,
    Dropping,
    Samples,
    Save,
    Seen,
    SizedLoader,
    Watch,
    loader_with_generator,
    plain_loader,
)
from tests.harness import models
from tests.harness.limits import wait_until
from tests.harness.pool import Pool, RunFailed
from tests.harness.thorough import covered
from tests.harness.training import Layout, data_rank, make_strategy, make_trainer
from tests.strategy.checkpoints.saving_runs import step_of

NEVER = Save("never", 0)
EPOCHS = 3


@dataclass(frozen=True)
class Signal:
    """Which signal a rank sends itself, and where."""

    rank: int
    hook: str = "on_train_batch_start"
    batch: int = 6
    """the batch of the run in which it comes; of validation in "on_validation_batch_start" """
    number: int = signal.SIGTERM
    waits: bool = False
    """here, until the ranks have agreed: no rank begins another batch"""

    def at(self, hook: str, batch: int, trainer: Any) -> None:
        """Send it if this is the place. In set-up the ranks agree before anything else happens."""
        if (hook, batch, int(os.environ.get("RANK", 0))) == (self.hook, self.batch, self.rank):
            os.kill(os.getpid(), self.number)
            if self.waits or hook in ("setup", "on_sanity_check_start"):
                assert wait_until(lambda: trainer.strategy.session.stops._stop.decision, 10.0)


class Signalled(Watch):
    """Notes what is trained, and sends a signal."""

    def __init__(self, own: Signal | None, folder: Path) -> None:
        super().__init__(NEVER, folder)
        self.own, self.num_validated = own, 0
        self.ended_by = ""

    def at(self, trainer: Any, hook: str, batch: int = 0) -> None:
        if self.own is not None:
            self.own.at(hook, batch, trainer)

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.at(trainer, "setup")

    def on_sanity_check_start(self, trainer: Any, *_: Any) -> None:
        self.at(trainer, "on_sanity_check_start")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.at(trainer, "on_train_batch_start", trainer.fit_loop.epoch_loop.total_batch_idx)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.at(trainer, "on_train_epoch_end", trainer.current_epoch)

    def on_validation_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.num_validated += 1
        self.at(trainer, "on_validation_batch_start", self.num_validated)

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.ended_by = type(exception).__mro__[1].__name__
        with (self.folder / f"exception-{trainer.global_rank}").open("w") as file:
            file.write(f"{self.ended_by} {trainer.received_sigterm} {trainer.interrupted} {trainer.global_step}")


def fit(layout: Layout, folder: Path, own: Signal | None, options: dict[str, Any], resume: bool) -> Seen:
    """Train on one rank. The stopped run and the resumed one have other seeds than the undisturbed one."""
    warnings.filterwarnings(
        "ignore", message=".*no `val_dataloader`|.*does not have many workers|.*is not empty|.*sampler has shuffling"
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # processes in the background ignore it
    options = dict(options)
    strategy = {name: options.pop(name) for name in ("save_async", "save_full") if name in options}
    seed_everything(100 * resume + data_rank(layout))
    watch = Signalled(own, folder)
    saves = ModelCheckpoint(folder, save_top_k=0)
    load, others = options.pop("loader", SizedLoader), options.pop("callbacks", [])
    trainer = make_trainer(
        layout,
        strategy=make_strategy(layout, **strategy),
        callbacks=[watch, *others, *([saves] if options.get("enable_checkpointing", True) else [])],
        max_epochs=EPOCHS,
        **{"num_sanity_val_steps": 0, "enable_checkpointing": True} | options,
    )
    module = models.build(Dropping)
    torch.manual_seed(100 * resume + data_rank(layout))
    validates = options.get("val_check_interval") or options.get("num_sanity_val_steps")
    validation = [DataLoader(Samples(0), batch_size=SIZE, shuffle=True)] if validates else []
    path = folder / CHECKPOINT_NAME if resume else None
    trainer.fit(module, load(Samples(data_rank(layout))), *validation, ckpt_path=path)
    return watch.seen


def stop(pool: Pool, layout: Layout, folder: Path, own: Signal, **options: Any) -> RunFailed:
    """Train until the signal."""
    with pytest.raises(RunFailed) as caught:
        pool.run(layout.world_size, fit, layout, folder, own, options, False)
    return caught.value


def assert_stopped_run_goes_on(pool: Pool, folder: Path, layout: Layout, own: Signal, **options: Any) -> None:
    """All ranks stop at one step; the resumed run ends with the weights and losses of the undisturbed one."""
    ended = stop(pool, layout, folder, own, **options)
    assert {(one.kind, one.message) for one in ended.failures} == {("StoppedBySignal", "75")}, ended
    notes = {(folder / f"exception-{rank}").read_text() for rank in range(layout.world_size)}
    assert len(notes) == 1 and notes.pop().startswith("SIGTERMException True True")
    assert sum(one.output.count("stopped by SIGTERM on rank") for one in ended.failures) == 1, ended
    whole = pool.run(layout.world_size, fit, layout, folder, None, options, False)
    rest = pool.run(layout.world_size, fit, layout, folder, None, options, True)
    for before, after in zip(whole, rest, strict=True):
        num_trained = len(before.losses) - len(after.losses)
        assert 0 < num_trained < EPOCHS * NUM_BATCHES
        assert after.steps == before.steps[num_trained:]
        assert all(torch.equal(loss, before.losses[number]) for number, loss in after.losses.items())
        assert after.weights.keys() == before.weights.keys()
        assert all(torch.equal(after.weights[name], value) for name, value in before.weights.items())


class ValidatesOtherWeights(Callback):
    """Halves the weights for the time of a validation, as others put averages in their place."""

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self._scale(module, 0.5)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._scale(module, 2.0)

    def _scale(self, module: Any, factor: float) -> None:
        for parameter in module.parameters():
            parameter.data.mul_(factor)


ONE, PIPE, BOTH = Layout(1), Layout(2), Layout(2, data=2)
CUBE = Layout(1, cube=(1, 2, 1))
STOPS = [
    *((BOTH, Signal(rank), "") for rank in range(4)),
    *((CUBE, Signal(rank), "") for rank in range(2)),
    (ONE, Signal(0), ""),
    (PIPE, Signal(1), "accumulation"),
    (PIPE, Signal(1), "save_async"),
    (PIPE, Signal(1, "on_validation_batch_start", 7), "validation"),
    (BOTH, Signal(3, "on_validation_batch_start", 7), "validation"),
    (PIPE, Signal(0, "on_validation_batch_start", 7), "validation at the end"),
    (PIPE, Signal(0, "on_train_epoch_end", 1), ""),
    (PIPE, Signal(1, "on_train_batch_start", 9, waits=True), "plain loader"),
    (PIPE, Signal(1, "on_train_batch_start", 9, waits=True), "loader with generator"),
    (PIPE, Signal(1, "on_validation_batch_start", 7), "other weights"),
]
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "save_async": {"save_async": True},
    "validation": {"val_check_interval": 2},
    "validation at the end": {"val_check_interval": NUM_BATCHES},
    "plain loader": {"loader": plain_loader},
    "loader with generator": {"loader": loader_with_generator},
    "other weights": {"val_check_interval": 2, "callbacks": [ValidatesOtherWeights()]},
}


@pytest.mark.parametrize(("layout", "own", "kind"), covered(STOPS, by=[STOPS[7]]), ids=str)
def test_sigterm_to_a_rank(pool: Pool, tmp_path: Path, layout: Layout, own: Signal, kind: str) -> None:
    assert_stopped_run_goes_on(pool, tmp_path, layout, own, **OPTIONS[kind])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("own", "options"),
    [
        (Signal(1, "setup", 0), {}),
        (Signal(1, "on_sanity_check_start", 0), {"num_sanity_val_steps": 2}),
        (Signal(0, "on_train_batch_start", 6), {"enable_checkpointing": False}),
    ],
    ids=str,
)
def test_a_run_with_nothing_to_save_says_so(pool: Pool, tmp_path: Path, own: Signal, options: dict[str, Any]) -> None:
    ended = stop(pool, PIPE, tmp_path, own, **options)
    assert {(one.kind, one.message) for one in ended.failures} == {("StoppedBySignal", "75")}, ended
    assert "nothing is saved" in "".join(one.output for one in ended.failures)
    assert not (tmp_path / CHECKPOINT_NAME).exists()


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.thorough)])
def test_sigint_saves_and_is_a_keyboard_interrupt_for_callbacks(pool: Pool, tmp_path: Path, rank: int) -> None:
    ended = stop(pool, PIPE, tmp_path, Signal(rank, number=signal.SIGINT))
    assert {(one.kind, one.message) for one in ended.failures} == {("SystemExit", "130")}, ended
    notes = [(tmp_path / f"exception-{rank}").read_text() for rank in range(2)]
    assert notes[0] == notes[1] and notes[0].startswith("KeyboardInterrupt False True")
    assert step_of(tmp_path / CHECKPOINT_NAME) == int(notes[0].split()[-1])
    assert sum(one.output.count("stopped by SIGINT on rank") for one in ended.failures) == 1


class SignalledEvaluation(Callback):
    """Sends SIGTERM in the third batch of an evaluation."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def _send(self, trainer: Any, *args: Any) -> None:
        if args[-2:] == (2, 0) and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
            assert wait_until(lambda: trainer.strategy.session.stops._stop.decision, 10.0)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int, loader: int = 0) -> None:
        self._send(trainer, idx, loader)

    def on_test_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int, loader: int = 0) -> None:
        self._send(trainer, idx, loader)

    def on_predict_batch_start(self, trainer: Any, module: Any, batch: Any, idx: int, loader: int = 0) -> None:
        self._send(trainer, idx, loader)


class Evaluated(Dropping):
    test_step = Dropping.validation_step

    def predict_step(self, batch: models.Batch, batch_idx: int) -> Any:
        return self(batch["x"])


def evaluate(layout: Layout, what: str, num_batches: tuple[int, ...], rank: int) -> None:
    """Evaluate alone; data ranks may have different numbers of batches."""
    warnings.filterwarnings("ignore", message=".*does not have many workers|.*sync_dist=True")
    samples = torch.utils.data.Subset(Samples(0), range(SIZE * num_batches[data_rank(layout)]))
    trainer = make_trainer(layout, strategy=make_strategy(layout), callbacks=[SignalledEvaluation(rank)])
    getattr(trainer, what)(models.build(Evaluated), DataLoader(samples, batch_size=SIZE))


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["validate", "test", "predict"])
@pytest.mark.parametrize(("layout", "rank"), [(PIPE, 1), (ONE, 0)], ids=str)
def test_an_evaluation_stops_and_saves_nothing(pool: Pool, layout: Layout, what: str, rank: int) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(layout.world_size, evaluate, layout, what, (5,), rank)
    assert {(one.kind, one.message) for one in caught.value.failures} == {("StoppedBySignal", "75")}, caught.value
    assert "there is nothing to save" in "".join(one.output for one in caught.value.failures)


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["validate", "test", "predict"])
def test_data_ranks_with_other_numbers_of_batches_end_alike(pool: Pool, what: str) -> None:
    """If one has ended its evaluation before the decision, the other one ends it, too."""
    try:
        pool.run(2, evaluate, Layout(1, data=2), what, (5, 3), 0)
    except RunFailed as ended:
        assert [one.kind for one in ended.failures] == ["StoppedBySignal", "StoppedBySignal"], ended


def requeue(layout: Layout, folder: Path, rank: int, resume: bool) -> Seen:
    """Train as a job of SLURM, whose `scontrol` only notes that it was called."""
    (folder / "scontrol").write_text(f"#!/bin/sh\necho $@ >> {folder}/called\n")
    (folder / "scontrol").chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    os.environ |= {"SLURM_JOB_ID": "17", "SLURM_PROCID": os.environ["RANK"], "SLURM_LOCALID": os.environ["RANK"]}
    os.environ |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "train", "SLURM_NODEID": "0"}
    own = None if resume else Signal(rank, number=signal.SIGUSR1)
    options = {"plugins": [OnPorts()], "default_root_dir": folder}
    return fit(layout, folder, own, options, resume=False)


class OnPorts(SLURMEnvironment):
    """Processes that have been started already, each on its own."""

    main_port = property(lambda _: int(os.environ["MASTER_PORT"]))


@pytest.mark.thorough
def test_slurm_starts_a_run_again_that_has_got_its_signal(pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        pool.run(2, requeue, PIPE, tmp_path, 1, False)
    assert {(one.kind, one.message) for one in caught.value.failures} == {("StoppedBySignal", "75")}, caught.value
    assert (tmp_path / "called").read_text() == "requeue 17\n"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    rest = pool.run(2, requeue, PIPE, tmp_path, 1, True)
    assert 0 < len(rest[0].losses) < EPOCHS * NUM_BATCHES

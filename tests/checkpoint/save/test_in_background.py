"""Saves in the background: one in flight, removals after it, and its error on all ranks at one poll."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_hanayo.dist_checkpointing import save as module
from lightning_hanayo.dist_checkpointing.commit import RankPart, RanksLost, SavingRanks, TensorPart
from lightning_hanayo.dist_checkpointing.folder import CheckpointFolder
from lightning_hanayo.dist_checkpointing.region import Region
from lightning_hanayo.dist_checkpointing.save import Saver
from lightning_hanayo.dist_checkpointing.target import AtPoint, Point, go_on
from lightning_hanayo.errors import CheckpointError
from tests.checkpoint.save.states import part_of, step_of
from tests.harness.peers import ThreadPeers, on_ranks


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "last.ckpt")


class Held:
    """Stops a save at a point until it is let go, and says when it is there."""

    def __init__(self, point: Point) -> None:
        self._point = point
        self._arrived, self._may_go = threading.Event(), threading.Event()

    def __call__(self, point: Point) -> None:
        if point == self._point and not self._may_go.is_set():
            self._arrived.set()
            assert self._may_go.wait(60)

    def wait(self) -> None:
        assert self._arrived.wait(60)

    def let_go(self) -> None:
        self._may_go.set()


def on_two_ranks(
    run: Callable[[ThreadPeers, Saver], object], at: Callable[[int], AtPoint] = lambda rank: go_on
) -> None:
    """Run both ranks, each in a thread with a Saver that has peers of its own for the background."""
    backgrounds = ThreadPeers.of_all(2)
    on_ranks(2, lambda peers: run(peers, Saver(peers, backgrounds[peers.rank], at=at(peers.rank))))


def test_training_goes_on_while_the_values_of_then_are_written(path: str) -> None:
    held = Held(Point.BEGUN)
    saver = Saver(SavingRanks(), SavingRanks(), at=held)
    weight = torch.ones(2, 3)
    part = TensorPart("model/weight", weight, (2, 3), Region.whole((2, 3)), "model")
    saver.save(path, RankPart([part], {}, {"step": 1}))
    weight.zero_()
    held.wait()
    saver.poll()  # nothing to say
    assert not os.path.exists(path)
    held.let_go()
    saver.finish()
    assert CheckpointFolder(path).read("model/weight").equal(torch.ones(2, 3))


def test_the_next_save_waits_for_the_one_in_flight(path: str) -> None:
    """So at most one snapshot is in memory, and checkpoints appear in the order in which they were saved."""
    begun: list[Point] = []

    def run(peers: ThreadPeers, saver: Saver) -> None:
        for step in (1, 2, 3):
            saver.save(path, part_of(peers.rank, step))
            assert sum(point == Point.BEGUN for point in begun) <= 2 * step
            if step > 1:
                assert begun.count(Point.CLEANED) >= 2 * (step - 1)
        saver.finish()

    on_two_ranks(run, lambda rank: begun.append)
    assert step_of(path) == 3


def test_what_is_removed_meanwhile_goes_once_the_new_checkpoint_is_there(tmp_path: Path) -> None:
    old, new = str(tmp_path / "step=1.ckpt"), str(tmp_path / "step=2.ckpt")
    there_at: dict[Point, bool] = {}
    held = Held(Point.BEGUN)

    def at(point: Point) -> None:
        there_at[point] = os.path.exists(old)
        held(point)

    Saver(SavingRanks()).save(old, part_of(0, 1, num_ranks=1))
    saver = Saver(SavingRanks(), SavingRanks(), at=at)
    saver.save(new, part_of(0, 2, num_ranks=1))
    saver.remove(old)
    assert os.path.exists(old)
    held.let_go()
    saver.finish()
    assert there_at[Point.COMMITTED] and not os.path.exists(old)
    assert step_of(new) == 2


def test_an_error_in_the_background_is_raised_by_all_ranks_at_one_poll(tmp_path: Path) -> None:
    old, new = str(tmp_path / "step=1.ckpt"), str(tmp_path / "step=2.ckpt")
    errors: list[tuple[int, str]] = []

    def fail(point: Point) -> None:
        if point == Point.HALF_WRITTEN:
            raise OSError(5, "Input/output error", "/dev/disk")

    def run(peers: ThreadPeers, saver: Saver) -> None:
        saver.save(new, part_of(peers.rank, 2))
        saver.remove(old)
        for batch in range(10_000):
            try:
                saver.poll()
            except CheckpointError as error:
                errors.append((batch, str(error)))
                break
        saver.finish()

    on_ranks(2, lambda peers: Saver(peers).save(old, part_of(peers.rank, 1)))
    on_two_ranks(run, lambda rank: fail if rank == 1 else go_on)
    assert len(errors) == 2 and len(set(errors)) == 1, "one message, at one batch"
    assert errors[0][1] == (
        f"{new} (step 2) was not saved: /dev/disk can't be written: Input/output error (rank 1). What was there before "
        f"is untouched."
    )
    assert os.listdir(tmp_path) == ["step=1.ckpt"]
    assert step_of(old) == 1, "nothing is removed after a save that failed"


def test_after_an_error_the_next_save_works(path: str) -> None:
    failures = iter([OSError(5, "Input/output error")])

    def fail_once(point: Point) -> None:
        if point == Point.WRITTEN and (error := next(failures, None)) is not None:
            raise error

    def run(peers: ThreadPeers, saver: Saver) -> None:
        saver.save(path, part_of(peers.rank, 1))
        with pytest.raises(CheckpointError, match="step 1.*was not saved"):
            saver.finish()
        saver.save(path, part_of(peers.rank, 2))
        saver.finish()

    on_two_ranks(run, lambda rank: fail_once if rank == 0 else go_on)
    assert step_of(path) == 2


def test_ranks_talk_at_a_batch_only_while_a_save_is_in_flight(path: str) -> None:
    calls: list[Any] = []

    class CountedPeers(SavingRanks):
        def all_gather(self, value: Any) -> list[Any]:
            calls.append(value)
            return [value]

    saver = Saver(CountedPeers(), SavingRanks())
    saver.poll()
    assert not calls
    saver.save(path, part_of(0, 1, num_ranks=1))
    saver._tasks.wait()
    saver.poll()
    saver.poll()
    assert len(calls) == 1


def test_a_save_in_flight_is_given_up_on_all_ranks_after_a_failure(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has failed and waits for its thread in vain; so it stops the thread, and rank 0 hears of it."""
    monkeypatch.setattr(module, "ABANDON_WITHIN", 0.01)
    held = Held(Point.FOLDER_MADE)
    errors: list[str] = []

    def run(peers: ThreadPeers, saver: Saver) -> None:
        saver.save(path, part_of(peers.rank, 1))
        if peers.rank == 1:
            held.wait()
            peers.close = lambda: None  # type: ignore[method-assign]  # rank 0 shall hear it from the save
            saver._background.close = lambda: None  # type: ignore[method-assign, union-attr]
            tasks = saver._tasks
            saver.abandon()
            held.let_go()
            tasks.wait()
        else:
            saver._tasks.wait()
            errors.append(str(saver._tasks.error))
            saver._tasks.wait()

    on_two_ranks(run, lambda rank: held if rank == 1 else go_on)
    assert errors == [
        f"{path} (step 1) was not saved: the run has failed meanwhile (rank 1). What was there before is untouched."
    ]
    assert os.listdir(os.path.dirname(path)) == []


def test_abandoning_does_not_wait_for_ranks_that_are_gone(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ABANDON_WITHIN", 0.01)
    backgrounds = ThreadPeers.of_all(2)
    saver = Saver(SavingRanks(), backgrounds[0])
    saver.save(path, part_of(0, 1))
    tasks = saver._tasks
    saver.abandon()  # the other rank never comes
    saver.finish()
    tasks.wait()
    assert isinstance(tasks.error, CheckpointError)
    assert isinstance(tasks.error.__cause__, RanksLost)
    assert os.listdir(os.path.dirname(path)) == []

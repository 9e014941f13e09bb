"""A report comes once no rank makes progress, and again after a while; only ranks that can never go on end the run."""

import threading
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest

from lightning_hanayo.monitor.monitor import Monitor
from lightning_hanayo.monitor.peers import Timing
from lightning_hanayo.strategy.hangs import HangWatch, Limits
from lightning_hanayo.strategy.waits import Status, Wait
from tests.harness.limits import wait_until
from tests.harness.monitors import QUICK

LIMITS = Limits(first=0.2, again=0.2, look=0.02)


@dataclass
class Pretended:
    """What a rank pretends to do."""

    rank: int
    wait: Wait | None = None
    done: dict[str, int] = field(default_factory=dict)
    number: int = 0

    def progress(self) -> int:
        return self.number

    def read(self, still: float, channels: Any = ()) -> Status:
        return Status(
            self.rank, self.number, still, "step 12 (training)", self.wait, "is in hook, model.py:31", done=self.done
        )


class Moving(Pretended):
    """A rank that makes progress; it notes whether it was asked."""

    was_asked = False

    def progress(self) -> int:
        self.number += 1
        return self.number

    def read(self, still: float, channels: Any = ()) -> Status:
        self.was_asked = True
        return super().read(still, channels)


class RecordedFailures:
    """Notes which failures a watch finds."""

    def __init__(self, monitor: Monitor, ended: list[str]) -> None:
        self.monitor, self.ended = monitor, ended
        self.held_up_by: tuple[int, str] | None = None
        self.first: Any = None

    @property
    def speaks(self) -> bool:
        return self.monitor.arbiter == self.monitor.rank

    def fail_for(self, rank: int, what: str) -> None:
        self.ended.append(f"rank {rank} {what}")


class World:
    """Ranks whose monitors are threads of this process."""

    def __init__(self, *ranks: Pretended, limits: Limits = LIMITS, timing: Timing | None = None) -> None:
        self.ranks = ranks
        self.monitors = [Monitor(one.rank, len(ranks), f"pipeline {one.rank}", "127.0.0.1", timing) for one in ranks]
        self.ended: list[str] = []
        self.failures = [RecordedFailures(monitor, self.ended) for monitor in self.monitors]
        for monitor in self.monitors:
            monitor.connect([one.member for one in self.monitors], "token")
        self.watches = [
            HangWatch(failures, own, timedelta(minutes=30), limits)  # type: ignore[arg-type]
            for failures, own in zip(self.failures, ranks, strict=True)
        ]

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: Any) -> None:
        for watch in self.watches:
            watch.stop()
        closing = [threading.Thread(target=monitor.close) for monitor in self.monitors]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def message(source: int, number: int = 0) -> Wait:
    return Wait("a message", (source,), f"from {source}", number, (source,))


def test_who_holds_the_others_up_is_said_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    with World(Pretended(0, message(1)), Pretended(1), Pretended(2, message(0))) as world:
        texts: list[str] = []

        def said_twice() -> bool:
            texts.append(capsys.readouterr().err)
            return "".join(texts).count("No progress") == 2

        assert wait_until(said_twice, 30.0)
        text = "".join(texts)
        assert text.startswith("No progress for 0.")
        assert " s in step 12 (training).\n  rank 1 (pipeline 1) waits for nobody: it is in hook, model.py:31\n" in text
        assert "\n  rank 0 (pipeline 0) waits for rank 1: a message\n" in text
        assert "\nThe run goes on. A rank that has waited for 0:30:00 (timeout) ends it.\n" in text
        assert wait_until(lambda: all(failures.held_up_by for failures in world.failures), 10.0)
        blame = [1, "rank 1 (pipeline 1) waits for nobody: it is in hook, model.py:31"]
        assert [failures.held_up_by for failures in world.failures] == [blame] * 3
    assert world.ended == []


def test_nothing_is_said_while_a_rank_moves(capsys: pytest.CaptureFixture[str]) -> None:
    moving = Moving(1)
    with World(Pretended(0, message(1)), moving):
        assert wait_until(lambda: moving.was_asked, 30.0)
    assert capsys.readouterr().err == ""


def test_a_rank_that_moves_is_not_blamed_any_more() -> None:
    with World(Pretended(0, message(1)), Pretended(1)) as world:
        assert wait_until(lambda: world.failures[0].held_up_by is not None, 30.0)
        world.watches[0]._next = float("inf")
        world.ranks[0].number += 1
        assert wait_until(lambda: world.failures[0].held_up_by is None, 30.0)


def test_a_place_that_is_only_slow_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    with World(Pretended(0, message(1)), Pretended(1), limits=Limits(first=0.2, again=600.0, look=0.02)) as world:
        for _ in range(2):
            assert wait_until(lambda: all(failures.held_up_by for failures in world.failures), 30.0)
            for rank in world.ranks:
                rank.number += 1
            assert wait_until(lambda: not any(failures.held_up_by for failures in world.failures), 30.0)
    assert capsys.readouterr().err.count("No progress") == 1


def test_ranks_that_all_compute_wait_for_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    with World(Pretended(0), Pretended(1)) as world:
        assert wait_until(lambda: world.failures[0].held_up_by is not None, 30.0)
    text = capsys.readouterr().err
    assert "ranks 0 and 1 are in hook, model.py:31\nThe run goes on: no rank waits for another one.\n" in text


def test_ranks_that_can_never_go_on_end_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = Pretended(0, message(1, 4), {"from 0": 3}), Pretended(1, message(0, 4), {"from 1": 3})
    with World(*ranks) as world:
        assert wait_until(lambda: len(world.ended) > 0, 30.0)
    text = capsys.readouterr().err
    assert text.endswith("The run ends, since ranks 0 and 1 can never go on.\n")
    assert world.ended[0].startswith("rank 0 can never go on, nor can rank 1: each waits for")


def test_the_next_rank_reports_if_rank_0_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    with World(Pretended(0), Pretended(1, message(2)), Pretended(2)) as world:
        world.watches[0].stop()
        assert wait_until(lambda: 0 in world.monitors[1].ask("hang status"), 30.0)
        world.monitors[0].close()
        assert wait_until(lambda: "has ended" in str(world.failures[1].held_up_by), 30.0)
    text = capsys.readouterr().err
    assert "rank 0 (pipeline 0) has ended" in text
    assert "rank 2 (pipeline 2) waits for nobody" in text


def test_a_run_that_has_failed_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with World(Pretended(0, message(1)), Pretended(1)) as world:
        world.failures[0].first = "a failure"
        assert wait_until(lambda: world.watches[0]._looked > world.watches[0]._since + 2 * LIMITS.first, 30.0)
    assert capsys.readouterr().err == ""


def test_a_rank_outside_of_the_run_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with World(Pretended(0, message(1)), Pretended(1)) as world:
        world.watches[1].stop()
        assert wait_until(lambda: world.failures[0].held_up_by is not None, 30.0)
    assert "rank 1 (pipeline 1) is outside of the Trainer's run" in capsys.readouterr().err


def test_a_rank_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    blocked = threading.Event()
    with World(Pretended(0, message(1)), Pretended(1), timing=QUICK) as world:
        world.monitors[1].on("block", lambda *_: blocked.wait())
        world.monitors[1].tell("block", None)
        try:
            assert wait_until(lambda: world.failures[0].held_up_by is not None, 30.0)
        finally:
            blocked.set()
    assert "rank 1 (pipeline 1) does not answer: it holds Python's lock (GIL), or its host" in capsys.readouterr().err


def test_a_watch_that_was_stopped_asks_nothing_and_has_no_status() -> None:
    with World(Pretended(0, message(1)), Pretended(1)) as world:
        for watch in world.watches:
            watch.stop()
        assert world.monitors[0].ask("hang status") == {0: None, 1: None}
        assert wait_until(lambda: "hanayo-hang-report" not in {one.name for one in threading.enumerate()}, 10.0)


def test_a_rank_in_a_hook_after_training_is_reported_until_the_trainer_returns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with World(Pretended(0), Pretended(1), limits=Limits(first=2.0, look=0.02)) as world:
        for watch in world.watches:
            watch.finish()
        world.watches[0].stop()
        assert wait_until(lambda: 0 in world.monitors[1].ask("hang status"), 30.0)
        world.monitors[0].close()
        assert wait_until(lambda: world.monitors[1].state_of(0) == "ended", 30.0)
        texts: list[str] = []

        def is_said() -> bool:
            texts.append(capsys.readouterr().err)
            return "No progress" in "".join(texts)

        assert wait_until(is_said, 30.0)
        assert "rank 1 (pipeline 1) is in hook, model.py:31" in "".join(texts)
        assert "The run goes on: no rank waits for another one." in "".join(texts)

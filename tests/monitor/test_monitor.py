"""Monitors in the threads of one process: what one tells reaches all, and all get one verdict.

0 -- 1, 2, 4, 6, 7        0 tells: 1, 2, 4, 6 and 7 hear it from 0; 3 and 5 from those
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from lightning_hanayo.monitor.monitor import Monitor
from lightning_hanayo.monitor.overlay import neighbours
from lightning_hanayo.monitor.peers import Timing
from tests.harness.limits import wait_until
from tests.harness.monitors import QUICK, Worlds


def num_threads() -> int:
    return sum(thread.name == "hanayo-monitor" for thread in threading.enumerate())


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8, 1000, 1024])
def test_links_are_mutual_and_few(num_ranks: int) -> None:
    links = {rank: neighbours(rank, num_ranks) for rank in range(num_ranks)}
    assert all(rank in links[other] and other != rank for rank, others in links.items() for other in others)
    assert max(map(len, links.values())) <= 20
    reached, hops = {0}, 0
    while len(reached) < num_ranks:
        reached |= {other for rank in reached for other in links[rank]}
        hops += 1
    assert hops <= 6


@pytest.mark.parametrize("num_ranks", [1, 2, 12])
def test_what_one_tells_reaches_each_once(world: Worlds, num_ranks: int) -> None:
    monitors = world(num_ranks)
    heard: list[tuple[int, int, Any]] = []
    for monitor in monitors:
        monitor.on("news", lambda sender, content, rank=monitor.rank: heard.append((rank, sender, content)))
    monitors[-1].tell("news", {"step": 3})
    assert wait_until(lambda: len(heard) >= num_ranks, 10.0)
    monitors[0].ask("is anything under way?")
    assert sorted(heard) == [(rank, num_ranks - 1, {"step": 3}) for rank in range(num_ranks)]


def test_a_question_that_fails_on_a_rank_loses_no_answer(world: Worlds, capsys: pytest.CaptureFixture[str]) -> None:
    monitors = world(3)
    for monitor in monitors:
        monitor.answer("who", lambda _, rank=monitor.rank: rank if rank != 1 else 1 // 0)
    assert monitors[1].ask("who", timeout=30.0) == {0: 0, 2: 2}
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_all_get_one_verdict_when_all_propose_at_once(world: Worlds) -> None:
    monitors = world(16)
    with ThreadPoolExecutor(16) as threads:
        verdicts = set(threads.map(lambda monitor: monitor.decide("who", monitor.rank), monitors))
    assert len(verdicts) == 1
    assert {monitor.decide("who", -1) for monitor in monitors} == verdicts
    assert monitors[3].verdict("another") is None


def test_the_next_rank_decides_when_the_arbiter_is_lost(world: Worlds) -> None:
    monitors = world(5, replace(QUICK, takeover=2.0))  # a busy machine holds up no rank for so long
    assert {monitor.arbiter for monitor in monitors} == {0}
    monitors[0].ask("are all linked?", timeout=10.0)  # so that they hear its good-bye
    monitors[0].close()
    assert [monitor.decide("who", monitor.rank) for monitor in monitors[1:]] == [1] * 4
    assert wait_until(lambda: {monitor.arbiter for monitor in monitors[1:]} == {1}, 10.0)


def test_the_next_rank_decides_when_the_arbiter_does_not_answer(world: Worlds) -> None:
    monitors = world(4)
    blocked = threading.Event()
    monitors[0].on("block", lambda *_: blocked.wait())
    monitors[0].tell("block", None)
    try:
        assert monitors[2].decide("who", 2) == 2
    finally:
        blocked.set()
    assert monitors[0].decide("who", 0) == 2


def test_those_answer_that_can(world: Worlds) -> None:
    monitors = world(10, replace(QUICK, silent=30.0))  # a busy machine silences none
    for monitor in monitors[1:]:
        monitor.answer("rank plus", lambda number, rank=monitor.rank: rank + number)
    asked = monitors[4].ask("rank plus", 100, timeout=30.0)
    assert asked == {rank: rank + 100 for rank in range(1, 10)}


def test_a_verdict_on_answers_waits_for_all_that_can_still_come(world: Worlds) -> None:
    monitors = world(4)
    monitors[3].ask("steps", timeout=10.0)  # so that it is linked, and others hear its good-bye
    monitors[3].close()
    for monitor in monitors[:2]:
        monitor.answer("steps", lambda _, rank=monitor.rank: 10 + rank)
    with ThreadPoolExecutor(2) as threads:
        verdicts = [threads.submit(one.settle, "steps", sorted, within=30.0) for one in monitors[:2]]
        monitors[2].answer("steps", lambda _: 12)
        assert [verdict.result() for verdict in verdicts] == [[0, 1, 2]] * 2
    assert monitors[2].settle("others", sorted, within=0.0) == []


def test_a_removed_handler_hears_nothing(world: Worlds) -> None:
    first, second = world(2)
    heard: list[Any] = []
    first.on("news", lambda *_: heard.append("removed"))()
    first.on("news", lambda *_: heard.append("kept"))
    second.tell("news", None)
    assert wait_until(lambda: bool(heard), 10.0)
    assert heard == ["kept"]


def test_a_function_is_called_again_and_again(world: Worlds) -> None:
    monitor, _ = world(2)
    calls: list[None] = []
    remove = monitor.every(0.01, lambda: calls.append(None))
    assert wait_until(lambda: len(calls) > 2, 10.0)
    remove()


def test_a_handler_that_fails_is_shown_and_the_monitor_goes_on(
    world: Worlds, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = world(2)
    first.on("news", lambda *_: {}["no such key"])
    second.tell("news", None)
    assert second.decide("after that", "it runs") == "it runs"
    assert wait_until(lambda: "no such key" in capsys.readouterr().err, 10.0)


def test_two_worlds_do_not_see_each_other(world: Worlds) -> None:
    one, other = world(2, token="one"), world(2, token="other")
    assert one[0].decide("topic", 1) == 1 and one[1].verdict("topic", wait=10.0) == 1
    assert other[1].decide("topic", 2) == 2


def test_a_world_of_one_rank_has_no_thread(world: Worlds) -> None:
    before = num_threads()
    (monitor,) = world(1)
    assert monitor.decide("topic", "mine") == "mine"
    monitor.answer("who", lambda _: 0)
    assert monitor.ask("who") == {0: 0}
    assert num_threads() == before


def test_threads_and_files_end_with_their_monitors(world: Worlds) -> None:
    before, files = num_threads(), len(os.listdir("/proc/self/fd"))
    for monitor in world(4):
        monitor.close()
        monitor.close()
    assert wait_until(lambda: (num_threads(), len(os.listdir("/proc/self/fd"))) == (before, files), 10.0)


def test_silence_is_seen_and_forgotten(world: Worlds) -> None:
    monitors = world(3)
    blocked = threading.Event()
    monitors[1].on("block", lambda *_: blocked.wait())
    monitors[1].tell("block", None)
    try:
        assert wait_until(lambda: monitors[0].state_of(1) == "silent", 10.0)
    finally:
        blocked.set()
    assert wait_until(lambda: monitors[0].state_of(1) == "running", 10.0)


def test_a_rank_that_says_goodbye_has_ended_without_a_reason(world: Worlds) -> None:
    first, second = world(2)
    assert second.decide("are we linked?", "yes") == "yes"
    second.close()
    assert wait_until(lambda: first.state_of(1) == "ended", 10.0)
    assert first.peer(1).reason == ""


def test_links_that_end_without_a_word_are_made_again(world: Worlds) -> None:
    monitors: list[Monitor] = world(3, Timing(lost=60.0))
    assert monitors[0].decide("before", 0) == 0
    monitors[0]._call(lambda: [link.transport.abort() for link in list(monitors[0]._overlay._links.values())])
    assert monitors[2].decide("after", 2) == 2
    assert {monitor.verdict("after", wait=10.0) for monitor in monitors} == {2}
    assert [monitor.state_of(0) for monitor in monitors] == ["running"] * 3

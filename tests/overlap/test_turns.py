"""Two actions in two threads: who has the device, in which order collectives go, and what an error does."""

import signal
import threading
import time
from typing import Any

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.overlap.link_queue import DeviceLink, LinkQueue
from lightning_hanayo.overlap.turns import DeviceTurns


class Transfer:
    """Takes so long, and notes when it was put on the wire."""

    def __init__(self, name: str, wire: list[str], seconds: float = 0.0) -> None:
        self.name, self.wire, self.seconds = name, wire, seconds

    def __call__(self) -> "Transfer":
        self.wire.append(self.name)
        return self

    def wait(self) -> None:
        time.sleep(self.seconds)


@pytest.fixture
def queue() -> Any:
    made = LinkQueue()
    yield made
    made.close()
    assert not [thread for thread in threading.enumerate() if thread.name in ("hanayo-link", "hanayo-pair")]


def action(queue: LinkQueue, name: str, wire: list[str], count: int, seconds: float = 0.0) -> Any:
    def run() -> str:
        for number in range(count):
            queue.start(Transfer(f"{name}{number}", wire, seconds)).wait()
        return name

    return run


def test_by_turns_the_order_is_that_of_the_program(queue: LinkQueue) -> None:
    for _ in range(20):
        wire: list[str] = []
        queue.begin_pair(None)
        assert queue.turns.run(action(queue, "a", wire, 3, 0.001), action(queue, "b", wire, 2)) == ("a", "b")
        queue.end_pair()
        assert wire == ["a0", "b0", "a1", "b1", "a2"]


def test_the_wire_keeps_to_the_plan(queue: LinkQueue) -> None:
    plan = [(1, 0), (1, 1), (0, 0), (0, 1), (0, 2)]
    wire: list[str] = []
    queue.begin_pair(plan)
    queue.turns.run(action(queue, "a", wire, 3), action(queue, "b", wire, 2), by_turns=False)
    queue.end_pair()
    assert wire == ["b0", "b1", "a0", "a1", "a2"]


@pytest.mark.parametrize(("counts", "words"), [((3, 2), "3 and 2"), ((1, 2), "1 and 2"), ((2, 1), "2 and 1")])
def test_other_collectives_than_planned_are_an_error_and_no_hang(
    queue: LinkQueue, counts: tuple[int, int], words: str
) -> None:
    plan = [(0, 0), (1, 0), (1, 1), (0, 1)]
    wire: list[str] = []

    def checked(slot: int, run: Any) -> Any:
        def act() -> Any:
            result = run()
            queue.check_action(slot)
            return result

        return act

    first, second = (checked(slot, action(queue, name, wire, counts[slot])) for slot, name in enumerate("ab"))
    queue.begin_pair(plan)
    with pytest.raises(HanayoError, match=r"planned with \[2, 2\] collectives"):
        queue.turns.run(first, second, by_turns=False)
    queue.end_pair()


@pytest.mark.parametrize("ends", [True, False])
def test_what_waits_behind_a_collective_that_never_starts_is_an_error_and_no_hang(queue: LinkQueue, ends: bool) -> None:
    """The second action waits for b1, which the plan puts behind b2; the first one has ended, or waits for a1."""
    plan = [(0, 0), (1, 0), (1, 2), (1, 1), *([] if ends else [(0, 1)])]
    first, second = (action(queue, name, [], count) for name, count in (("a", 1 if ends else 2), ("b", 3)))

    def checked() -> None:
        first()
        queue.check_action(0)

    queue.begin_pair(plan)
    with pytest.raises(HanayoError, match="collectives in an order, and started"):
        queue.turns.run(checked, second, by_turns=False)
    queue.end_pair()
    assert action(queue, "again", [], 2)() == "again"


def test_an_error_that_reaches_an_action_while_it_waits_for_its_turn_unwinds_the_other(queue: LinkQueue) -> None:
    def interrupt(*_: Any) -> None:
        raise TimeoutError("of a signal's handler")

    has_begun = threading.Event()

    def first() -> None:
        queue.start(Transfer("a", [])).wait()

    def second() -> None:
        has_begun.set()
        time.sleep(0.2)  # the first one waits for the device meanwhile
        queue.start(Transfer("b", [])).wait()

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        queue.begin_pair(None)
        with pytest.raises(TimeoutError, match="handler"):
            queue.turns.run(first, second)
        queue.end_pair()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert has_begun.is_set()
    assert action(queue, "again", [], 2)() == "again"


@pytest.mark.parametrize("by_turns", [True, False])
@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_of_one_action_unwinds_the_other(queue: LinkQueue, fails: int, by_turns: bool) -> None:
    wire: list[str] = []
    unwound: list[str] = []

    def failing() -> None:
        queue.start(Transfer("f", wire)).wait()
        raise ValueError("its own error")

    def waiting() -> None:
        try:
            action(queue, "w", wire, 10**6, 0.001)()
        finally:
            unwound.append("w")

    actions = (failing, waiting) if fails == 0 else (waiting, failing)
    queue.begin_pair(None)
    with pytest.raises(ValueError, match="its own error"):
        queue.turns.run(*actions, by_turns=by_turns)
    queue.end_pair()
    assert unwound == ["w"]
    assert action(queue, "again", [], 2)() == "again"


def test_only_one_action_has_the_device(queue: LinkQueue) -> None:
    inside: list[int] = []
    most = 0

    def run() -> None:
        nonlocal most
        for _ in range(50):
            inside.append(1)
            most = max(most, len(inside))
            time.sleep(0.0001)
            inside.pop()
            queue.start(Transfer("t", [], 0.0002)).wait()

    queue.begin_pair(None)
    queue.turns.run(run, run, by_turns=False)
    queue.end_pair()
    assert most == 1


class State:
    def __init__(self) -> None:
        self.now = ""

    def save(self) -> str:
        return self.now

    def restore(self, saved: str) -> None:
        self.now = saved


@pytest.mark.parametrize("by_turns", [True, False])
def test_each_action_finds_its_own_state(queue: LinkQueue, by_turns: bool) -> None:
    state = State()
    queue.turns.states = [state]

    def run(name: str) -> Any:
        def act() -> None:
            state.now = name
            for _ in range(20):
                queue.start(Transfer(name, [], 0.0002)).wait()
                assert state.now == name

        return act

    queue.begin_pair(None)
    queue.turns.run(run("a"), run("b"), by_turns=by_turns)
    queue.end_pair()


def test_a_recording_knows_what_an_action_does(queue: LinkQueue) -> None:
    recording = queue.record()
    first = queue.start(Transfer("a", [], 0.01))
    time.sleep(0.005)
    second = queue.start(Transfer("b", [], 0.02))
    second.wait()
    first.wait()
    recording.add()
    segments = recording.segments()
    assert [(one.start is not None, one.wait) for one in segments] == [
        (True, None), (True, None), (False, 1), (False, 0), (False, None),
    ]  # fmt: skip
    assert segments[0].start == pytest.approx(0.01, abs=0.008) and segments[1].compute >= 0.005


def test_a_device_starts_collectives_at_once_and_hosts_take_turns() -> None:
    link, wire = DeviceLink(), []
    link.turns.run(action(link, "a", wire, 2), action(link, "b", wire, 2))
    assert wire == ["a0", "b0", "a1", "b1"]
    link.close()


def test_without_a_pair_nothing_changes_hands() -> None:
    turns = DeviceTurns()
    turns.wait(lambda: False, lambda: None)
    turns.offer()
    assert turns.slot == 0

"""Two actions in two threads: who has the device, in which order collectives go, and what an error does."""

import signal
import threading
import time
from typing import Any

import pytest

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
        assert queue.turns.run(action(queue, "a", wire, 3, 0.001), action(queue, "b", wire, 2)) == ("a", "b")
        assert wire == ["a0", "b0", "a1", "b1", "a2"]


def test_the_device_stays_where_it_is_while_an_action_waits_for_what_an_earlier_one_has_started(
    queue: LinkQueue,
) -> None:
    wire: list[str] = []
    earlier = queue.start(Transfer("earlier", wire, 0.01))

    def first() -> None:
        earlier.wait()
        action(queue, "a", wire, 2)()

    queue.turns.run(first, action(queue, "b", wire, 2))
    assert wire == ["earlier", "a0", "b0", "a1", "b1"]


@pytest.fixture
def alarm() -> Any:
    """A signal's handler that raises, soon."""

    def interrupt(*_: Any) -> None:
        raise TimeoutError("of a signal's handler")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("alarm")
def test_an_error_that_reaches_an_action_while_it_waits_for_its_turn_unwinds_the_other(queue: LinkQueue) -> None:
    has_begun = threading.Event()

    def second() -> None:
        has_begun.set()
        time.sleep(0.2)  # the first one waits for the device meanwhile
        queue.start(Transfer("b", [])).wait()

    with pytest.raises(TimeoutError, match="handler"):
        queue.turns.run(action(queue, "a", [], 1), second)
    assert has_begun.is_set()
    assert action(queue, "again", [], 2)() == "again"


@pytest.mark.usefixtures("alarm")
def test_an_error_wakes_the_other_action_from_a_collective_that_never_ends(queue: LinkQueue) -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match="handler"):
        queue.turns.run(action(queue, "a", [], 2), lambda: queue.start(lambda: never).wait())
    never.set()


@pytest.mark.usefixtures("alarm")
def test_a_pair_after_one_that_was_left_begins_with_action_0(queue: LinkQueue) -> None:
    goes_on, order = threading.Event(), list[int]()
    with pytest.raises(TimeoutError, match="handler"):
        queue.turns.run(lambda: None, goes_on.wait)
    goes_on.set()
    queue.turns.run(lambda: order.append(0), lambda: order.append(1))
    assert order == [0, 1]


@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_of_one_action_unwinds_the_other(queue: LinkQueue, fails: int) -> None:
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
    with pytest.raises(ValueError, match="its own error"):
        queue.turns.run(*actions)
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

    queue.turns.run(run, run)
    assert most == 1


class State:
    def __init__(self) -> None:
        self.now = ""

    def save(self) -> str:
        return self.now

    def restore(self, saved: str) -> None:
        self.now = saved


def test_each_action_finds_its_own_state(queue: LinkQueue) -> None:
    state = State()
    queue.turns.states = [state]

    def run(name: str) -> Any:
        def act() -> None:
            state.now = name
            for _ in range(20):
                queue.start(Transfer(name, [], 0.0002)).wait()
                assert state.now == name

        return act

    queue.turns.run(run("a"), run("b"))


def test_a_device_starts_collectives_at_once_and_hosts_take_turns() -> None:
    link, wire = DeviceLink(), []
    link.turns.run(action(link, "a", wire, 2), action(link, "b", wire, 2))
    assert wire == ["a0", "b0", "a1", "b1"]
    link.close()


def test_without_a_pair_nothing_changes_hands() -> None:
    turns, waited = DeviceTurns(), []
    turns.wait(lambda: waited.append(turns.slot), turns.action)
    assert waited == [0]

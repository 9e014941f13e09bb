"""Turns: two actions of a rank run at once, in two threads, but only one of them uses the device at a time.

    action 0   |compute| wait ...        |compute| wait ...  |compute|     the device changes hands wherever an action
    action 1           |compute| wait ...        |compute|                 waits, needed or not, beginning with 0

An action gives the device away only where it waits for a collective that it has started itself, so it sees no
concurrency between two of these. The order in which both start collectives depends on the program alone, not on
clocks, and so is the same on all ranks. What an earlier action has started has ended as a rule: giving the device away
for it would only change which waits of both actions come together (whole 2,2,2, M = 8h: 1.35 of the bound, not 1.17).
"""

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class ActionState(Protocol):
    """State of the process that belongs to the action that has the device."""

    def save(self) -> Any:
        """Called when the action gives the device away. Returns the state for `restore`."""

    def restore(self, saved: Any) -> None:
        """Called when it has the device again."""


class _OtherFailed(BaseException):
    """Unwinds an action after the other one has failed."""


class DeviceTurns:
    """Which of two actions uses the device. Outside of pairs there is one action, which always has it."""

    def __init__(self) -> None:
        self.slot = 0
        """the action that has the device: 0, or 1 in a pair"""
        self.states: Sequence[ActionState] = ()
        """saved and restored whenever the device changes hands"""
        self._number = 0
        """of the pair that runs; between two pairs a number of its own"""
        self.on_failure: Callable[[], None] = lambda: None
        """called when an action has failed, so that nothing that it has begun holds up the other one"""
        self._running: set[int] = set()
        """the actions of a pair that haven't ended"""
        self._turn: tuple[SimpleQueue[None], ...] = ()
        """for each action: an entry when it is its turn. No signal's handler can leave a queue locked"""
        self._failed = False
        self._partner = Worker("hanayo-pair")

    def __reduce__(self) -> tuple[type["DeviceTurns"], tuple[()]]:
        """A copy, in another process maybe, has turns of its own."""
        return DeviceTurns, ()

    def run(self, first: Callable[[], T], second: Callable[[], T]) -> tuple[T, T]:
        """Run both actions, `second` in a thread of its own, and return both results.

        Raises:
            BaseException: of an action; the other one is unwound.
        """
        self._running, self._failed, self.slot = {0, 1}, False, 0
        self._turn = SimpleQueue(), SimpleQueue()
        self._turn[0].put(None)
        self._number += 1
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def act(slot: int, action: Callable[[], T]) -> None:
            try:
                self._take(slot)
                results[slot] = action()
            except _OtherFailed:
                pass
            except BaseException as error:  # raised again by the main thread
                errors.append(error)
                self._failed = True
                self.on_failure()
            self._give_away(slot, ends=True)

        done = threading.Event()

        def act_second() -> None:
            act(1, second)
            done.set()

        self._partner.submit(act_second)
        act(0, first)  # in this thread: user code outside of pairs runs here, too
        done.wait()
        self.slot = 0
        self._number += 1
        if errors:
            raise errors[0]
        return results[0], results[1]

    @property
    def action(self) -> tuple[int, int]:
        """Tells the action that has the device from all others."""
        return self._number, self.slot

    def wait(self, block: Callable[[], object], starter: tuple[int, int]) -> None:
        """Wait until `block` returns, for a collective that the action `starter` has started.

        If that is this one, in a pair the other action has the device before, until it waits or ends.
        """
        if self._running and starter == self.action:
            slot, saved = self.slot, [state.save() for state in self.states]
            self._give_away(slot)
            self._take(slot)
            for state, one in zip(self.states, saved, strict=True):
                state.restore(one)
        block()

    def close(self, timeout: float = 5.0) -> None:
        """End the thread, and wait for so many seconds until it has ended."""
        self._partner.close(timeout)

    def _give_away(self, slot: int, *, ends: bool = False) -> None:
        """The other action has the device next, unless it has ended."""
        self._running -= {slot} if ends else set()
        if 1 - slot in self._running:
            self.slot = 1 - slot
            self._turn[1 - slot].put(None)
        elif not ends:
            self._turn[slot].put(None)

    def _take(self, slot: int) -> None:
        self._turn[slot].get()
        if self._failed:
            raise _OtherFailed


class Worker:
    """A thread that runs one task after another. It starts with the first one, also after it was closed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, task: Callable[[], object]) -> None:
        """Run the task, which raises nothing, after those before it."""
        if self._thread is None:
            self._tasks = SimpleQueue()
            self._thread = threading.Thread(target=_run_all, args=(self._tasks,), daemon=True, name=self._name)
            self._thread.start()
        self._tasks.put(task)

    def close(self, timeout: float) -> None:
        """End the thread, and wait for so many seconds until it has ended."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            thread.join(timeout)


def _run_all(tasks: "SimpleQueue[Callable[[], object] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()
        del task  # frees its tensors

"""Turns: two actions of a rank run at once, in two threads, but only one of them uses the device at a time.

    action 0   |compute| wait for a collective ...     |compute| ...        by turns: always in this order
    action 1           |compute         | wait ... ....        |compute|    or each goes on as soon as it can

An action gives the device away only where it waits (`DeviceTurns.wait`), so it sees no concurrency between two waits.
By turns, the order in which both start collectives depends on the program alone, and so is the same on all ranks.
Otherwise it depends on clocks, and a queue must put collectives in a planned order (`link_queue.py`).
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
        self.is_pair = False
        self.number = 0
        """of the pair that runs; between two pairs a number of its own"""
        self.states: Sequence[ActionState] = ()
        """saved and restored whenever the device changes hands"""
        self.on_failure: Callable[[], None] = lambda: None
        """called when an action has failed, so that nothing that it has begun holds up the other one"""
        self._by_turns = True
        self._prefer: int | None = None
        self._changed = threading.Condition()
        self._is_free = False
        self._waiting: list[int] = []
        self._failed = False
        self._partner = Worker("hanayo-pair")

    def __reduce__(self) -> tuple[type["DeviceTurns"], tuple[()]]:
        """A copy, in another process maybe, has turns of its own."""
        return DeviceTurns, ()

    def run(
        self, first: Callable[[], T], second: Callable[[], T], *, by_turns: bool = True, prefer: int | None = None
    ) -> tuple[T, T]:
        """Run both actions, `second` in a thread of its own, and return both results.

        Args:
            first: the action 0.
            second: the action 1.
            by_turns: whether the device changes hands wherever an action waits, even if it needn't, beginning with 0.
            prefer: otherwise, which of them gets the device where both could use it; None: the one that waits longer,
                and first the action 0.

        Raises:
            BaseException: of an action; the other one is unwound.
        """
        self._by_turns, self._prefer, self._failed = by_turns, prefer, False
        self._waiting, self._is_free = [0, 1], True  # in this order: 0 begins
        self.slot, self.is_pair = 0, True
        self.number += 1
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
            self._give()

        done = threading.Event()

        def act_second() -> None:
            act(1, second)
            done.set()

        self._partner.submit(act_second)
        act(0, first)  # in this thread: user code outside of pairs runs here, too
        done.wait()
        self.slot, self.is_pair = 0, False
        self.number += 1
        if errors:
            raise errors[0]
        return results[0], results[1]

    def wait(self, is_done: Callable[[], bool], block: Callable[[], None]) -> None:
        """Wait until `block` returns; in a pair the other action has the device meanwhile."""
        if not self.is_pair:
            block()
        elif self._by_turns:
            self._hand_over(lambda: None, stands_in_line=True)
            block()
        elif is_done():
            block()
            self.offer()
        else:
            self._hand_over(block, stands_in_line=False)

    def offer(self) -> None:
        """Give the device to the preferred action, if it could use it."""
        if self.is_pair and not self._by_turns and self._prefer != self.slot and self._prefer in self._waiting:
            self._hand_over(lambda: None, stands_in_line=True)

    def close(self, timeout: float = 5.0) -> None:
        """End the thread, and wait for so many seconds until it has ended."""
        self._partner.close(timeout)

    def _hand_over(self, block: Callable[[], None], *, stands_in_line: bool) -> None:
        """Give the device away, `block`, and take it again."""
        slot = self.slot
        saved = [state.save() for state in self.states]
        self._give(slot if stands_in_line else None)
        try:
            block()
        finally:
            self._take(slot)
        for state, one in zip(self.states, saved, strict=True):
            state.restore(one)

    def _give(self, back: int | None = None) -> None:
        """Give the device away. `back`: this action stands in line for it again at once."""
        with self._changed:
            self._is_free = True
            if back is not None:
                self._waiting.append(back)
            self._changed.notify_all()

    def _take(self, slot: int) -> None:
        with self._changed:
            if slot not in self._waiting:
                self._waiting.append(slot)
            try:
                self._changed.wait_for(lambda: self._is_free and self._next() == slot)
            except BaseException:  # of a signal's handler: the other action must not wait for this one
                self._waiting.remove(slot)
                self._changed.notify_all()
                raise
            self._waiting.remove(slot)
            self._is_free = False
            self.slot = slot
        if self._failed:
            raise _OtherFailed

    def _next(self) -> int:
        return self._prefer if self._prefer in self._waiting else self._waiting[0]


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

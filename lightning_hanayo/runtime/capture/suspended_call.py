"""The suspension: a function that runs in a thread of its own until it wants something that isn't there yet.

    main thread   step = SuspendedCalls.begin(function) ......... step.resume(value) ........ step.result
    its thread              function() -> suspend() ............... value -> ... return

One of all these threads runs at a time, so user code sees no concurrency; a thread keeps autocast and grad mode apart.
Threads are reused: there are as many as functions were ever under way at once.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from lightning_hanayo.runtime.capture.thread_state import ThreadState


class _Abandoned(BaseException):
    """Raised inside a suspended function that nobody will resume, to unwind it."""


class CallThread(threading.Thread):
    """A reusable thread. `visitor` is what `current_visitor` finds when called from inside."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="hanayo-step")
        self.orders: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.visitor: Any = None
        self.step: SuspendedCall | None = None
        self.start()

    def run(self) -> None:
        """Carry out orders until one is None."""
        while (order := self.orders.get()) is not None:
            order()
            del order  # and with it what the step returned


def current_visitor() -> Any:
    """The visitor of the step that calls this; None outside one."""
    return getattr(threading.current_thread(), "visitor", None)


def suspend() -> Any:
    """Called inside a step: let the main thread go on, and return what it resumes the step with."""
    thread = threading.current_thread()
    assert isinstance(thread, CallThread) and thread.step is not None
    return thread.step.suspend()


class SuspendedCall:
    """One function under way. After `run` and after `resume` it is either suspended or `done`, with its `result`."""

    def __init__(self, thread: CallThread, function: Callable[[], Any]) -> None:
        self.result: Any = None
        self.done = False
        self._function = function
        self._thread = thread
        self._context = ThreadState.current()
        self._values: SimpleQueue[Any] = SimpleQueue()
        self._news: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self, visitor: Any) -> None:
        """Start; return when the function suspends or ends, and raise what it raises."""
        self._thread.visitor, self._thread.step = visitor, self
        self._thread.orders.put(self._work)
        self._wait()

    def suspend(self) -> Any:
        """Called inside: let the main thread go on, and return what `resume` is given."""
        self._context.check_unchanged()
        self._news.put(None)
        value = self._values.get()
        if isinstance(value, _Abandoned):
            raise value
        return value

    def resume(self, value: Any) -> None:
        """Let the suspended function go on with `value`, until it ends."""
        self._values.put(value)
        self._wait()

    def abandon(self) -> None:
        """Unwind a suspended function without resuming it."""
        if not self.done:
            self._values.put(_Abandoned())
            self._news.get()

    def _wait(self) -> None:
        error = self._news.get()
        if error is not None:
            raise error

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            with self._context.applied():
                self.result = self._function()
        except BaseException as raised:  # the main thread raises it
            error = raised
        self._thread.visitor = self._thread.step = None
        self.done = True
        self._news.put(error)


class SuspendedCalls:
    """The steps under way, and the threads that wait for the next ones."""

    def __init__(self) -> None:
        self._idle: list[CallThread] = []
        self._busy: dict[SuspendedCall, CallThread] = {}

    def begin(self, function: Callable[[], Any], visitor: Any) -> SuspendedCall:
        """Run `function` in a thread until it suspends or ends; `visitor` is what `current_visitor` finds there."""
        thread = self._idle.pop() if self._idle else CallThread()
        step = SuspendedCall(thread, function)
        self._busy[step] = thread
        step.run(visitor)
        return step

    def release(self, step: SuspendedCall) -> None:
        """Take back the thread of a step that is done."""
        self._idle.append(self._busy.pop(step))

    def close(self) -> None:
        """Unwind what is suspended and end all threads."""
        for step, thread in list(self._busy.items()):
            step.abandon()
            self._idle.append(thread)
        self._busy.clear()
        for thread in self._idle:
            thread.orders.put(None)
        for thread in self._idle:
            thread.join(timeout=5)
        self._idle.clear()

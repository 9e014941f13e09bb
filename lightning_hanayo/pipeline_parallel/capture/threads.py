"""Suspended calls: a function runs in a thread of its own and waits there for a value that the main thread makes.

    main thread   call = SuspendedCalls.start(function) ......... call.resume(value) ........ call.result
    its thread              function() -> suspend() ............... value -> ... return

Only one of these threads runs at a time, so user code sees no concurrency. A thread has its own autocast and grad mode.
Threads are reused: there are as many as functions have ever been under way at once.

Context variables (`contextvars`) have the main thread's values, and what the function sets is set there when it ends.
"""

import threading
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from queue import SimpleQueue
from typing import Any

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.runtime.capture.thread_state import ThreadState


class _Abandoned(BaseException):
    """Raised inside a suspended function that will not be resumed, to unwind it."""


class CallThread(threading.Thread):
    """A reusable thread. `tracer` is what `current_tracer` returns in it."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="hanayo-step")
        self.tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.tracer: Any = None
        self.call: SuspendedCall | None = None
        self.start()

    def run(self) -> None:
        """Run tasks until one is None."""
        while (task := self.tasks.get()) is not None:
            task()
            del task  # frees what the step returned


def current_tracer() -> Any:
    """The tracer of the step that runs in the calling thread; None outside a step."""
    thread = threading.current_thread()
    return thread.tracer if isinstance(thread, CallThread) else None


def suspend() -> Any:
    """Called inside a step: let the main thread continue, and return the value it resumes the step with."""
    thread = threading.current_thread()
    assert isinstance(thread, CallThread) and thread.call is not None
    return thread.call.suspend()


class SuspendedCall:
    """One function under way. After `run` and after `resume` it is suspended, or it is `done` and has a `result`."""

    def __init__(
        self, thread: CallThread, function: Callable[[], Any], state: ThreadState, variables: "Variables"
    ) -> None:
        self.result: Any = None
        self.done = False
        self._function = function
        self.thread = thread
        self._state = state
        self._variables = variables
        self._values: SimpleQueue[Any] = SimpleQueue()
        self._events: SimpleQueue[BaseException | None] = SimpleQueue()

    def run(self, tracer: Any) -> None:
        """Start; return when the function suspends or ends, and raise what it raises."""
        self.thread.tracer, self.thread.call = tracer, self
        self.thread.tasks.put(self._work)
        self._wait()

    def suspend(self) -> Any:
        """Called inside the function: let the main thread continue, and return what `resume` is given."""
        self._state.check_unchanged()
        self._variables.changed(copy_context())
        self._events.put(None)
        value = self._values.get()
        if isinstance(value, _Abandoned):
            raise value
        return value

    def resume(self, value: Any) -> None:
        """Continue the suspended function with `value`, until it suspends again or ends."""
        self._values.put(value)
        self._wait()

    def abandon(self) -> None:
        """Unwind a suspended function without resuming it."""
        if not self.done:
            self._values.put(_Abandoned())
            self._events.get()

    def _wait(self) -> None:
        error = self._events.get()
        if error is not None:
            raise error
        if self.done:
            self._variables.set_here()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            with self._state.applied():
                self.result = self._variables.run(self._function)
        except BaseException as raised:  # raised again in the main thread
            error = raised
        self.thread.tracer = self.thread.call = None
        self.done = True
        self._events.put(error)


class Variables:
    """The context variables of one call.

    Args:
        before: their values when it begins.
        are_read: whether the blocks' code reads a variable: blocks run elsewhere, where its value is not known.
    """

    def __init__(self, before: Context, are_read: Callable[[ContextVar[Any]], bool]) -> None:
        self._before = before
        self._are_read = are_read
        self._now = before.copy()
        self.run = self._now.run

    def changed(self, now: Context | None = None) -> list[ContextVar[Any]]:
        """What the function has set, which runs now or has ended.

        Raises:
            UnsupportedError: the blocks read it.
        """
        now = now or self._now
        found = [one for one, value in now.items() if one not in self._before or self._before[one] is not value]
        for variable in found:
            if self._are_read(variable):
                raise UnsupportedError(
                    f"the step sets the context variable {variable.name!r}, which the code of the block stack reads. "
                    f"Blocks run on several pipeline stages, where it has another value. Pass it to them as an "
                    f"argument, store it as an attribute of an object that they hold, or set it in "
                    f"on_train_batch_start, which runs on all ranks."
                )
        return found

    def set_here(self) -> None:
        """Set what the function has set in the calling thread."""
        for variable in self.changed():
            variable.set(self._now[variable])


class SuspendedCalls:
    """The calls under way, and the idle threads. `are_read` says which context variables the blocks' code reads."""

    def __init__(self, are_read: Callable[[ContextVar[Any]], bool] = lambda _: False) -> None:
        self.context: Context | None = None
        """with whose values calls begin; None: the calling thread's"""
        self._are_read = are_read
        self._idle: list[CallThread] = []
        self._busy: list[SuspendedCall] = []

    def start(self, function: Callable[[], Any], tracer: Any, state: ThreadState | None = None) -> SuspendedCall:
        """Run `function` in a thread until it suspends or ends; `tracer` is what `current_tracer` returns there.

        It begins in the given `state` of torch; None: in the calling thread's.
        """
        thread = self._idle.pop() if self._idle else CallThread()
        variables = Variables(self.context or copy_context(), self._are_read)
        call = SuspendedCall(thread, function, state or ThreadState.current(), variables)
        self._busy.append(call)
        call.run(tracer)
        return call

    def release(self, call: SuspendedCall) -> None:
        """Make the thread of a finished call idle again."""
        self._busy.remove(call)
        self._idle.append(call.thread)

    def close(self) -> None:
        """Unwind the suspended calls and end all threads."""
        while self._busy:
            call = self._busy.pop(0)
            call.abandon()
            self._idle.append(call.thread)
        for thread in self._idle:
            thread.tasks.put(None)
        for thread in self._idle:
            thread.join(timeout=5)
        self._idle.clear()

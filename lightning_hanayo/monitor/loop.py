"""A thread that runs functions: when a file is ready, when a time has come, or when another thread wants it."""

import os
import selectors
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MAX_WAIT = 1.0
"""seconds until the loop looks at the time again"""


class Timer:
    """Calls a function again and again, or once."""

    def __init__(self, seconds: float, function: Callable[[], object], *, repeats: bool) -> None:
        self.seconds, self.function, self.repeats = seconds, function, repeats
        self.due = time.monotonic() + seconds


class Loop:
    """The thread and what it waits for. All functions but `call`, `start` and `stop` are called in its thread."""

    def __init__(self) -> None:
        self.on_standstill: Callable[[float], object] = bool
        """called with the seconds for which the loop could do nothing, before anything else: this process was stopped,
        or could not run Python, or a function took so long"""
        self._files = selectors.DefaultSelector()
        self._wanted: deque[Callable[[], object]] = deque()
        self._timers: list[Timer] = []
        self._wake: socket.socket | None = None
        self._woken: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="hanayo-monitor")
        self._runs = True

    def start(self) -> None:
        """Start the thread."""
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        wake.send(b".")  # for what was wanted before
        self._files.register(woken, selectors.EVENT_READ, lambda _: woken.recv(4096))
        self._wake, self._woken = wake, woken
        self._thread.start()

    @property
    def is_current_thread(self) -> bool:
        """Whether this is called by the loop."""
        return threading.current_thread() is self._thread

    def call(self, function: Callable[[], object]) -> None:
        """Let the loop call the function soon. From any thread; returns at once."""
        self._wanted.append(function)
        with suppress(OSError):  # full: it is awake anyway; closed: nobody will call it
            if self._wake is not None:
                self._wake.send(b".")

    def every(self, seconds: float, function: Callable[[], object]) -> None:
        """Call the function again and again."""
        self.add(Timer(seconds, function, repeats=True))

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call the function once, after this round."""
        self.add(Timer(seconds, function, repeats=False))

    def add(self, timer: Timer) -> None:
        """Begin with the calls of a timer."""
        self._timers.append(timer)

    def cancel(self, timer: Timer) -> None:
        """Call its function no more."""
        if timer in self._timers:
            self._timers.remove(timer)

    def watch(self, file: Any, handler: Callable[[int], object], *, writes: bool = False) -> None:
        """Call the handler with the selector's events when the file can be read, or written if that is wanted."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        if file in self._files.get_map():
            self._files.modify(file, events, handler)
        else:
            self._files.register(file, events, handler)

    def unwatch(self, file: Any) -> None:
        """Wait for it no more."""
        if file in self._files.get_map():
            self._files.unregister(file)

    @property
    def is_started(self) -> bool:
        """Whether there is a thread, or was one."""
        return self._thread.ident is not None

    def end(self) -> None:
        """End the thread after this round."""
        self._runs = False

    def join(self, seconds: float) -> None:
        """Wait so long at most until the thread has ended; not if it is the caller."""
        if not self.is_current_thread:
            self._thread.join(seconds)

    def close_unstarted(self) -> None:
        """Close the files of a loop that never ran."""
        if not self.is_started:
            self.close_files()

    def leave_in_child(self) -> None:
        """Close all files in a forked process, which has no thread for them; its parent still waits for them."""
        files = [key.fileobj for key in self._files.get_map().values()]
        self.close_files()
        for file in files:
            if isinstance(file, int):
                os.close(file)
            else:
                file.close()  # type: ignore[attr-defined]

    def close_files(self) -> None:
        """Close what the loop itself has opened."""
        for file in (self._files, self._wake, self._woken):
            if file is not None:
                file.close()

    def _run(self) -> None:
        last = time.monotonic()
        while self._runs:
            due = min((timer.due for timer in self._timers), default=last + MAX_WAIT)
            begun = time.monotonic()
            wait = max(0.0, min(due - begun, MAX_WAIT))
            ready = self._files.select(wait)
            now = time.monotonic()
            guarded(self.on_standstill, begun - last + max(0.0, now - begun - wait))
            last = now
            for key, events in ready:
                current = self._files.get_map().get(key.fd)  # an earlier handler may have closed it
                if current is not None and current.fileobj is key.fileobj:
                    guarded(key.data, events)
            for _ in range(len(self._wanted)):
                guarded(self._wanted.popleft())
            self._run_timers(now)
        self.close_files()

    def _run_timers(self, now: float) -> None:
        for timer in [timer for timer in self._timers if timer.due <= now]:
            timer.due = now + timer.seconds
            if not timer.repeats:
                self.cancel(timer)
            guarded(timer.function)


def guarded(function: Callable[..., object], *arguments: Any) -> None:
    """Call it. An error is shown, and the loop goes on: others rely on it."""
    try:
        function(*arguments)
    except Exception:
        traceback.print_exc()

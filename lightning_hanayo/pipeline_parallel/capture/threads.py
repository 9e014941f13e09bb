"""Suspended calls: a function runs in its own thread and waits there for a value that the main thread makes.

    main thread   call = SuspendedCalls.start(function) ......... call.resume(value) ........ call.result
    its thread              function() -> suspend() ............... value -> ... return

Only one of these threads runs at a time, so user code sees no concurrency. Threads are reused: there are as many as
functions have ever been under way at once. Context variables (`contextvars`) have the main thread's values, and those
that the function sets are set there when it ends.

Each thread copies the state of torch from the main thread, and user code must not change it where it is suspended. Grad
mode, inference mode, autocast and the default device belong to a thread; SDPA flags, matmul flags and the default
dtype belong to the process. The stack's blocks run outside the user's `with` statements, so a state that is different
where the step calls the stack would silently be lost: an error, except that a pass without gradients is known as one.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field, fields
from queue import SimpleQueue
from typing import Any

import torch
from torch.autograd import forward_ad

from lightning_hanayo.errors import UnsupportedError

_DEVICES = ("cpu", "cuda")
Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""by device: whether it is enabled, and its dtype"""


@dataclass(frozen=True)
class ThreadState:
    """A snapshot. Errors print the field names."""

    grad_mode: bool
    inference_mode: bool
    autocast: Autocast
    autocast_cache: bool
    sdpa_kernels: tuple[bool, ...]
    matmul_precision: tuple[str, ...]
    default_dtype: torch.dtype
    default_device: str
    deterministic: bool
    torch_func_level: int
    forward_ad_level: int
    stream: Any

    @staticmethod
    def current() -> "ThreadState":
        """The state of the calling thread and of the process."""
        cuda = torch.backends.cuda
        # get_float32_matmul_precision raises if one of these newer settings is set without the older one
        on_cpu = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        chosen = (cuda.matmul.fp32_precision, on_cpu)
        return ThreadState(
            grad_mode=torch.is_grad_enabled(),
            inference_mode=torch.is_inference_mode_enabled(),
            autocast=autocast_state(),
            autocast_cache=torch.is_autocast_cache_enabled(),
            sdpa_kernels=(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
            matmul_precision=tuple("ieee" if one == "none" else one for one in chosen),  # "none": not chosen yet
            default_dtype=torch.get_default_dtype(),
            default_device=_default_device(),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            torch_func_level=torch._C._functorch.maybe_current_level() or 0,
            forward_ad_level=forward_ad._current_level,
            stream=torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        )

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the parts of the state that belong to a thread, in the calling thread."""
        with (
            autocast_as(self.autocast, self.autocast_cache),
            torch.inference_mode(self.inference_mode),
            torch.set_grad_enabled(self.grad_mode),
            # The default device is set only if it differs: once set, it makes every call of torch a little slower.
            nullcontext() if self.default_device == _default_device() else torch.device(self.default_device),
        ):
            if self.stream is not None:
                torch.cuda.set_device(self.stream.device)
                torch.cuda.set_stream(self.stream)
            yield

    def check_unchanged(self) -> None:
        """Compare with the calling thread's state now. Grad mode may be off where it was on: a pass without gradients.

        Raises:
            UnsupportedError: the user's code calls the stack inside a context that changes the state.
        """
        now = ThreadState.current()
        if now == self:
            return
        changed = [f.name for f in fields(self) if getattr(self, f.name) != getattr(now, f.name)]
        if self.grad_mode and changed == ["grad_mode"]:
            return
        hint = " For a pass without gradients use torch.no_grad()." if "inference_mode" in changed else ""
        details = ", ".join(f"{n.replace('_', ' ')} is {getattr(now, n)}, was {getattr(self, n)}" for n in changed)
        raise UnsupportedError(
            f"the block stack is called inside a context that changes {details}. Its blocks run on several "
            f"pipeline stages, outside that context. Set it for the whole run (Trainer(precision=...)) or inside the "
            f"block.{hint}"
        )


def autocast_state() -> Autocast:
    """The calling thread's."""
    return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES)


@contextmanager
def autocast_as(autocast: Autocast, cache: bool) -> Iterator[None]:
    """In this context autocast is as given, and caches or doesn't, in the calling thread."""
    before, cached = autocast_state(), torch.is_autocast_cache_enabled()
    _set_autocast(autocast, cache)
    try:
        yield
    finally:
        _set_autocast(before, cached)


def _set_autocast(autocast: Autocast, cache: bool) -> None:
    for device, enabled, dtype in autocast:
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_enabled(device, enabled)
    torch.set_autocast_cache_enabled(cache)


def _default_device() -> str:
    """The default device. Without a mode it is the CPU; torch takes 13 us to say so, longer than all else here."""
    return "cpu" if torch._C._len_torch_function_stack() == 0 else str(torch.get_default_device())


class _Abandoned(BaseException):
    """Raised inside a suspended function that will not be resumed, to unwind it."""


class CallThread(threading.Thread):
    """A reusable thread. `current_tracer` returns its `tracer` in it."""

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
            del task  # frees the step's result


def current_tracer() -> Any:
    """The tracer of the step that runs in the calling thread; None outside a step."""
    thread = threading.current_thread()
    return thread.tracer if isinstance(thread, CallThread) else None


def suspend() -> Any:
    """Called inside a step: let the main thread continue, and return the value it resumes the step with."""
    thread = threading.current_thread()
    assert isinstance(thread, CallThread) and thread.call is not None
    return thread.call.suspend()


@dataclass(eq=False, repr=False)
class SuspendedCall:
    """One function under way. After `run` and after `resume` it is suspended, or it is `done` and has a `result`."""

    calls: "SuspendedCalls"
    """those under way, with this one"""
    thread: CallThread
    function: Callable[[], Any]
    state: ThreadState
    variables: "Variables"
    tracer: Any = None
    result: Any = None
    done: bool = False
    _values: SimpleQueue[Any] = field(default_factory=SimpleQueue, init=False)
    _events: SimpleQueue[BaseException | None] = field(default_factory=SimpleQueue, init=False)

    def run(self, tracer: Any) -> None:
        """Start; return when the function suspends or ends, and raise its error."""
        self.tracer = self.thread.tracer = tracer
        self.thread.call = self
        self.thread.tasks.put(self._work)
        self._wait()

    def suspend(self) -> Any:
        """Called inside the function: let the main thread continue, and return the value that `resume` gets."""
        self.state.check_unchanged()
        self.variables.changed(copy_context())
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
            self.calls.release(self)

    def _wait(self) -> None:
        error = self._events.get()
        if self.done:
            self.calls.release(self)
        if error is not None:
            raise error
        if self.done:
            self.variables.set_here()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            with self.state.applied():
                self.result = self.variables.run(self.function)
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
        """The variables that the function has set, which runs now or has ended.

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
        """Set the same variables in the calling thread."""
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
        """Run `function` in a thread until it suspends or ends; `current_tracer` returns `tracer` there.

        It begins in the given `state` of torch; None: in the calling thread's.
        """
        thread = self._idle.pop() if self._idle else CallThread()
        variables = Variables(self.context or copy_context(), self._are_read)
        call = SuspendedCall(self, thread, function, state or ThreadState.current(), variables)
        self._busy.append(call)
        call.run(tracer)
        return call

    def release(self, call: SuspendedCall) -> None:
        """Called by a call that ends: its thread is idle again."""
        self._busy.remove(call)
        self._idle.append(call.thread)

    def close(self) -> None:
        """Unwind the suspended calls and end all threads."""
        while self._busy:
            self._busy[0].abandon()
        for thread in self._idle:
            thread.tasks.put(None)
        for thread in self._idle:
            thread.join(timeout=5)
        self._idle.clear()

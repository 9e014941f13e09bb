"""Suspended calls: a function runs in its own thread and waits there for a value that the main thread makes.

    main thread   call.resume() ................................. call.resume(value) ........ call.result
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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import get_ident
from typing import Any

import torch
from torch.autograd import forward_ad

from lightning_hanayo.errors import UnsupportedError

_DEVICES = ("cpu", "cuda")
Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""by device: whether it is enabled, and its dtype"""


_CUDA = torch.backends.cuda


def _matmul_precision() -> tuple[str, ...]:
    # get_float32_matmul_precision raises if one of these newer settings is set without the older one
    chosen = (_CUDA.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
    return tuple(["ieee" if one == "none" else one for one in chosen])  # "none": not chosen yet


def autocast_state() -> Autocast:
    """The calling thread's."""
    return tuple([(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _DEVICES])


def _default_device() -> str:
    """The default device. Without a mode it is the CPU; torch takes 13 us to say so, longer than all else here."""
    return "cpu" if torch._C._len_torch_function_stack() == 0 else str(torch.get_default_device())


class ThreadState(dict[str, Any]):
    """The facts at one time, of the calling thread and of the process, under the names that errors print."""

    @staticmethod
    def current() -> "ThreadState":
        """The state of the calling thread and of the process."""
        return ThreadState({
            "grad mode": torch.is_grad_enabled(),
            "inference mode": torch.is_inference_mode_enabled(),
            "autocast": autocast_state(),
            "autocast cache": torch.is_autocast_cache_enabled(),
            "sdpa kernels": (_CUDA.flash_sdp_enabled(), _CUDA.mem_efficient_sdp_enabled(), _CUDA.math_sdp_enabled()),
            "matmul precision": _matmul_precision(),
            "default dtype": torch.get_default_dtype(),
            "default device": _default_device(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "torch func level": torch._C._functorch.maybe_current_level() or 0,
            "forward ad level": forward_ad._current_level,
            "stream": torch.cuda.current_stream() if torch.cuda.is_initialized() else None,
        })  # fmt: skip

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the parts of the state that belong to a thread, in the calling thread."""
        device, stream = self["default device"], self["stream"]
        with (
            autocast_as(self["autocast"], self["autocast cache"]),
            torch.inference_mode(self["inference mode"]),
            torch.set_grad_enabled(self["grad mode"]),
            # The default device is set only if it differs: once set, it makes every call of torch a little slower.
            nullcontext() if device == _default_device() else torch.device(device),
        ):
            if stream is not None:
                torch.cuda.set_device(stream.device)
                torch.cuda.set_stream(stream)
            yield

    def check_unchanged(self) -> None:
        """Compare with the calling thread's state now. Grad mode may be off where it was on: a pass without gradients.

        Raises:
            UnsupportedError: the user's code calls the stack inside a context that changes the state.
        """
        now = ThreadState.current()
        if now == self:
            return
        changed = [name for name in self if self[name] != now[name]]
        if self["grad mode"] and changed == ["grad mode"]:
            return
        hint = " For a pass without gradients use torch.no_grad()." if "inference mode" in changed else ""
        details = ", ".join(f"{name} is {now[name]}, was {self[name]}" for name in changed)
        raise UnsupportedError(
            f"the block stack is called inside a context that changes {details}. Its blocks run on several pipeline "
            f"stages, outside it. Set it for the whole run (Trainer(precision=...)) or inside the block.{hint}"
        )


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


class _Abandoned(BaseException):
    """Raised inside a suspended function that will not be resumed, to unwind it."""


class CallThread(threading.Thread):
    """A reusable thread, which runs one suspended call after another."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="hanayo-step")
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        """the next call, or None to end; while a call is suspended, the value that it is resumed with"""
        self.outbox: SimpleQueue[BaseException | None] = SimpleQueue()
        """an entry for each suspension and each end of a call: its error, if it has failed"""
        self.start()

    def run(self) -> None:
        """Run calls until one is None."""
        while (call := self.inbox.get()) is not None:
            _calls[get_ident()], error = call, None
            try:
                with call.state.applied():
                    call.result = call.context.run(call.function)
            except BaseException as raised:  # raised again in the main thread
                error = raised
            _calls.pop(get_ident()).done = True
            del call  # the main thread is to free the step's result
            self.outbox.put(error)
            del error


_calls: "dict[int, SuspendedCall]" = {}
"""by the identity of a thread: the call that runs there, or is suspended"""


def current_tracer() -> Any:
    """The tracer of the step that runs in the calling thread; None outside a step."""
    call = _calls.get(get_ident())
    return None if call is None else call.tracer


def suspend() -> Any:
    """Called inside a step: let the main thread continue, and return the value it resumes the step with."""
    call = _calls[get_ident()]
    call.state.check_unchanged()
    call.changed_variables(copy_context())
    call.thread.outbox.put(None)
    value = call.thread.inbox.get()
    if isinstance(value, _Abandoned):
        raise value
    return value


@dataclass(eq=False, repr=False)
class SuspendedCall:
    """One function under way. After each `resume` it is suspended, or it is `done` and has a `result`."""

    calls: "SuspendedCalls"
    function: Callable[[], Any]
    tracer: Any
    """of the step: `current_tracer` finds it while the function runs"""
    state: ThreadState
    """of torch, in which it begins"""
    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """entered in the main thread while it runs"""
    result: Any = None
    done: bool = False
    _has_begun: bool = False

    def __post_init__(self) -> None:
        self._before = self.calls.context or copy_context()
        self.context = self._before.copy()
        """the function's context variables"""
        self.thread = self.calls.idle.pop() if self.calls.idle else CallThread()
        self.calls.busy.append(self)

    def resume(self, value: Any = None) -> None:
        """Start the function, or continue it with `value`, until it suspends or ends. Raises its error."""
        with self.around():
            self.thread.inbox.put(value if self._has_begun else self)
            self._has_begun = True
            error = self.thread.outbox.get()
            if self.done:
                self._release()
            if error is not None:
                raise error
            if self.done:
                for variable in self.changed_variables(self.context):
                    variable.set(self.context[variable])

    def abandon(self) -> None:
        """Unwind a suspended function without resuming it."""
        if not self.done:
            self.thread.inbox.put(_Abandoned())
            self.thread.outbox.get()
            self._release()

    def _release(self) -> None:
        self.calls.busy.remove(self)
        self.calls.idle.append(self.thread)

    def changed_variables(self, now: Context) -> list[ContextVar[Any]]:
        """The context variables that the function has set.

        Raises:
            UnsupportedError: the blocks read it: they run elsewhere, where its value is not known.
        """
        found = [one for one, value in now.items() if one not in self._before or self._before[one] is not value]
        for variable in filter(self.calls.are_read, found):
            raise UnsupportedError(
                f"the step sets the context variable {variable.name!r}, which the code of the block stack reads, on "
                f"other pipeline stages too. Pass it as an argument, or set it in on_train_batch_start on all ranks."
            )
        return found


@dataclass(eq=False, repr=False)
class SuspendedCalls:
    """The calls under way, and the idle threads. `are_read` says which context variables the blocks' code reads."""

    are_read: Callable[[ContextVar[Any]], bool] = lambda _: False
    context: Context | None = None
    """with whose values calls begin; None: the calling thread's"""
    idle: list[CallThread] = field(default_factory=list, init=False)
    busy: list[SuspendedCall] = field(default_factory=list, init=False)

    def close(self) -> None:
        """Unwind the suspended calls and end all threads."""
        while self.busy:
            self.busy[0].abandon()
        for thread in self.idle:
            thread.inbox.put(None)
            thread.join(timeout=5)
        self.idle.clear()

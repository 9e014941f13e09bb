"""A call waits in its own thread; the main thread gets its exceptions, and all threads end.

main     begin ........ (others run) ........ resume ........ result
thread     a  suspend                            b    return
"""

import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import pytest
import torch

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.threads import (
    SuspendedCall,
    SuspendedCalls,
    ThreadState,
    current_tracer,
    suspend,
)


@pytest.fixture
def steps() -> Iterator[SuspendedCalls]:
    before = set(threading.enumerate())
    found = SuspendedCalls()
    yield found
    found.close()
    assert set(threading.enumerate()) == before, "threads stay behind"


def start(steps: SuspendedCalls, function: Callable[[], object], tracer: object) -> SuspendedCall:
    call = SuspendedCall(steps, function, tracer, ThreadState.current())
    call.resume()
    return call


def test_several_calls_wait_and_end_in_any_order(steps: SuspendedCalls) -> None:
    seen: list[object] = []

    def function(name: str) -> object:
        seen.append((name, current_tracer()))
        return name, suspend()

    under_way = {name: start(steps, lambda name=name: function(name), tracer=name * 2) for name in "abc"}
    for number, name in enumerate("bca"):
        under_way[name].resume(number)
        assert under_way[name].result == (name, number)
    assert seen == [("a", "aa"), ("b", "bb"), ("c", "cc")] and current_tracer() is None


def test_threads_are_reused(steps: SuspendedCalls) -> None:
    before, idents = threading.active_count(), set()

    def function() -> None:
        idents.add(threading.get_ident())
        suspend()

    for _ in range(5):
        both = [start(steps, function, None) for _ in range(2)]
        for step in both:
            step.resume(None)
    assert len(idents) == 2 and threading.active_count() == before + 2


def test_an_exception_before_the_suspension(steps: SuspendedCalls) -> None:
    with pytest.raises(ZeroDivisionError):
        start(steps, lambda: 1 / 0, None)


def test_an_exception_after_it(steps: SuspendedCalls) -> None:
    step = start(steps, lambda: 1 / suspend(), None)
    with pytest.raises(ZeroDivisionError):
        step.resume(0)
    assert step.done


def test_without_suspension_it_is_done(steps: SuspendedCalls) -> None:
    step = start(steps, lambda: 7, None)
    assert step.done and step.result == 7


def test_abandoned_calls_clean_up(steps: SuspendedCalls) -> None:
    cleaned: list[str] = []

    def function() -> None:
        try:
            suspend()
        except Exception:
            cleaned.append("not an Exception, which user code may catch and go on")
        finally:
            cleaned.append("finally")

    for _ in range(3):
        start(steps, function, None)
    steps.close()
    assert cleaned == ["finally"] * 3


def test_user_code_runs_in_the_main_threads_modes(steps: SuspendedCalls) -> None:
    def modes() -> tuple[bool, bool, torch.dtype, bool, str]:
        return (
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
            torch.is_autocast_cache_enabled(), str(torch.empty(1).device),
        )  # fmt: skip

    contexts = [
        torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False), torch.enable_grad(),
    ]  # fmt: skip
    for context in contexts:
        with context:
            expected, step = modes(), start(steps, lambda: (modes(), suspend(), modes()), None)
        step.resume(None)
        assert step.result == (expected, None, expected)


NUMBER: ContextVar[int] = ContextVar("number", default=0)
READ: ContextVar[int] = ContextVar("read", default=0)


def test_context_variables_are_the_main_threads(steps: SuspendedCalls) -> None:
    def function() -> int:
        before = NUMBER.get()
        suspend()
        NUMBER.set(before + 1)
        return before

    NUMBER.set(3)
    both = [start(steps, function, None) for _ in range(2)]
    for step in both:
        step.resume(None)
    assert [step.result for step in both] == [3, 3] and NUMBER.get() == 4


@pytest.mark.parametrize("suspends", [True, False], ids=["before the stack", "at the end"])
def test_a_context_variable_that_blocks_read_is_refused(suspends: bool) -> None:
    def function(variable: ContextVar[int]) -> None:
        variable.set(1)
        if suspends:
            suspend()

    steps = SuspendedCalls(lambda variable: variable is READ)
    start(steps, lambda: function(NUMBER), None)
    with pytest.raises(UnsupportedError, match="sets the context variable 'read', which the code of the block stack"):
        start(steps, lambda: function(READ), None)
    assert READ.get() == 0
    steps.close()

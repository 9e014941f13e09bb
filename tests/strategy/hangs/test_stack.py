"""What a thread is doing, read from its stack by another one."""

import importlib.util
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lightning_hanayo.pipeline_parallel.capture.threads import SuspendedCall, SuspendedCalls, ThreadState, suspend
from lightning_hanayo.schedule import Action, Kind
from lightning_hanayo.strategy import hangs
from tests.harness.limits import wait_until


class Blocked:
    """User code that waits until it is told to go on."""

    def __init__(self) -> None:
        self.inside, self.go_on = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.inside.set()
        self.go_on.wait(60)

    def __call__(self) -> None:
        self.wait()


@contextmanager
def trainer_thread(function: Callable[[], object], blocked: Blocked) -> Iterator[int]:
    """The identity of a thread that runs the function, once it is blocked."""
    thread = threading.Thread(target=function)
    thread.start()
    assert blocked.inside.wait(60)
    assert thread.ident is not None
    yield thread.ident
    blocked.go_on.set()
    thread.join()


def test_the_line_of_user_code_is_read() -> None:
    blocked = Blocked()

    def hook() -> None:
        blocked()

    with trainer_thread(hook, blocked) as ident:
        text = hangs.doing(hangs.read_stack(ident).frames)
    line = Blocked.wait.__code__.co_firstlineno + 2
    source = Path(__file__).read_text().splitlines()[line - 1].strip()
    assert text == f"is in wait, tests/strategy/hangs/test_stack.py:{line}: {source}"


def test_the_step_that_runs_is_read_and_not_one_that_is_suspended() -> None:
    blocked, calls = Blocked(), SuspendedCalls()

    def suspended_step() -> None:
        suspend()

    def running_step() -> None:
        blocked()

    def run() -> None:
        for step in (suspended_step, running_step):
            SuspendedCall(calls, step, None, ThreadState.current()).resume()
        calls.close()

    with trainer_thread(run, blocked) as ident:
        threads, frames = hangs.read_stack(ident)
        names = [frame.f_code.co_name for frame in frames]
        text = hangs.doing(frames)
        del frames
    assert len(threads) == 2
    assert threads[1] == ident
    assert "running_step" in names
    assert "suspended_step" not in names
    assert names.index("running_step") < names.index("run")
    assert text.startswith("is in wait, ")


def test_a_thread_that_has_ended_has_no_stack() -> None:
    blocked = Blocked()
    with trainer_thread(blocked, blocked) as ident:
        pass
    assert wait_until(lambda: hangs.read_stack(ident).frames == [], 10.0)
    assert hangs.doing([]) == "is in a thread that has ended"


def test_nothing_that_was_read_stays_alive() -> None:
    blocked = Blocked()
    tensors: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        tensor = torch.ones(2)
        tensors.append(weakref.ref(tensor))
        blocked()

    calls = SuspendedCalls()

    def run() -> None:
        SuspendedCall(calls, step, None, ThreadState.current()).resume()
        calls.close()

    with trainer_thread(run, blocked) as ident:
        hangs.doing(hangs.read_stack(ident).frames)
        assert tensors[0]() is not None
    assert tensors[0]() is None


@pytest.mark.parametrize(
    ("module", "activity"),
    [
        ("torch._inductor.compile_fx", "compiling"),
        ("lightning_hanayo.dist_checkpointing.commit", "saving or loading a checkpoint"),
        ("torch.utils.data.dataloader", "reading from its data loader"),
        ("__main__", "computing the backward (of inputs) of stage 3, micro-batch 5"),
    ],
)
def test_what_the_code_is_about_is_named(module: str, activity: str) -> None:
    blocked = Blocked()
    library: dict[str, object] = {"__name__": module, "blocked": blocked}
    exec("def called(): blocked()", library)
    with trainer_thread(library["called"], blocked) as ident:  # type: ignore[arg-type]
        text = hangs.doing(hangs.read_stack(ident).frames, Action(3, Kind.I, 5))
    assert text.startswith(f"is {activity}, in wait, ")


@pytest.mark.parametrize("module", [*hangs._ACTIVITIES, hangs._TRAINER])
def test_the_modules_that_are_known_by_name_exist(module: str) -> None:
    assert importlib.util.find_spec(module) is not None

"""Tasks in the background, one after another."""

import threading

import pytest

from lightning_hanayo.dist_checkpointing.save import Background


def test_tasks_are_done_one_after_another_in_a_thread_that_keeps_no_process_alive() -> None:
    done: list[tuple[int, bool]] = []
    tasks = Background()
    for number in range(3):
        tasks.add(lambda number=number: done.append((number, threading.current_thread().daemon)))
    assert tasks.wait()
    assert done == [(0, True), (1, True), (2, True)]


def test_after_an_error_the_other_tasks_are_left_out() -> None:
    done: list[str] = []
    tasks = Background()
    tasks.add(lambda: done.append("save"))
    tasks.add(lambda: done.index("no such task"))  # ValueError
    tasks.add(lambda: done.append("remove"))
    tasks.wait()
    assert tasks.is_idle
    assert done == ["save"]
    assert isinstance(tasks.error, ValueError)
    tasks.wait()


def test_a_thread_ends_and_the_next_task_starts_another() -> None:
    threads: list[threading.Thread] = []
    tasks = Background()
    for _ in range(2):
        tasks.add(lambda: threads.append(threading.current_thread()))
        tasks.wait()
    assert len(set(threads)) == 2
    assert not any(thread.is_alive() for thread in threads)


def test_a_task_that_goes_on_is_not_waited_for_longer_than_asked() -> None:
    may_end = threading.Event()
    tasks = Background()
    tasks.add(may_end.wait)  # type: ignore[arg-type]
    assert not tasks.is_idle
    with pytest.MonkeyPatch.context() as patch:
        thread = tasks._thread
        assert thread is not None
        patch.setattr(thread, "join", lambda within: None)
        assert not tasks.wait(within=1.0)
    may_end.set()
    thread.join()

"""Ends that come in an unlucky order.

/proc/<pid>/stat     state Z       no file        a process is collected while it is looked at
the overlay          closed when the last link is lost, and again at the good-bye
"""

import socket

import pytest

from lightning_hanayo.monitor import processes
from lightning_hanayo.monitor.overlay import Loop, Overlay
from lightning_hanayo.monitor.processes import Member


def test_a_process_that_is_collected_between_two_looks_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = iter(["Z", ""])
    monkeypatch.setattr(processes, "_field", lambda pid, number: next(fields))
    assert processes.exit_status(1, None) is None


def test_an_overlay_is_closed_twice() -> None:
    listener, loop = socket.create_server(("127.0.0.1", 0)), Loop()
    members = [Member(rank, "", "127.0.0.1", 1, 1, 1, "") for rank in range(2)]
    overlay = Overlay(0, members, "token", listener, loop, on_message=print, on_up=print, on_lost=print)
    overlay.open()
    overlay.close()
    overlay.close()
    loop.close_files()
    assert listener.fileno() == -1

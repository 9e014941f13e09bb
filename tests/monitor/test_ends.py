"""Ends that come in an unlucky order.

/proc/<pid>/stat     state Z       no file        a process is collected while it is looked at
"""

import pytest

from lightning_hanayo.monitor import processes


def test_a_process_that_is_collected_between_two_looks_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = iter(["Z", ""])
    monkeypatch.setattr(processes, "_field", lambda pid, number: next(fields))
    assert processes.exit_status(1, None) is None

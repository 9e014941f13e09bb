"""What the link queue records of an action."""

from typing import Any

import pytest

from lightning_hanayo.overlap import link_queue
from lightning_hanayo.overlap.link_queue import LinkQueue


class Done:
    def wait(self) -> Any:
        return None


def test_compute_before_a_wait_for_another_actions_collective_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(link_queue, "perf_counter", lambda: now)
    queue = LinkQueue()
    earlier = queue.start(Done)
    recording = queue.record()
    now = 3.0  # computes, and then waits for what was started before it
    queue.wait(earlier)
    now = 4.0
    own = queue.start(Done)
    queue.wait(own)
    recording.add()
    first, *others = recording.segments()
    assert first.compute == 4.0 and first.start is not None
    assert [(one.compute, one.wait) for one in others] == [(0.0, 0), (0.0, None)]
    queue.close()

"""A trace keeps the last batches, and no more."""

from lightning_hanayo.runtime.profiling.trace import Trace
from lightning_hanayo.schedule import Action


def test_a_long_run_leaves_its_last_batches() -> None:
    trace = Trace(keep=3)
    for batch in range(10):
        trace.begin()
        reached = trace.clock()
        trace.add(Action.parse(f"0F{batch}"), reached, trace.clock())
        trace.end()
    trace.begin()  # one that hasn't ended doesn't count
    assert [[str(event.action) for event in events] for events in trace.batches] == [["0F7"], ["0F8"], ["0F9"]]
    assert all(event.reached <= event.start <= event.end for events in trace.batches for event in events)

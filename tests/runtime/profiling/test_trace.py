"""A trace keeps the last batches, and no more. Rank 0 receives whole traces."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from typing_extensions import override

from lightning_hanayo.clock import Clock
from lightning_hanayo.pipeline_parallel.trace import Trace, gather_trace, num_microbatches, pack, unpack
from lightning_hanayo.schedule import Action, CostModel, Schedule, build, with_loss_stage
from tests.harness.limits import real_seconds
from tests.harness.loopback import Hub
from tests.runtime.batch_traces import event, simulated_batch


def table(num_microbatches: int) -> Schedule:
    return with_loss_stage(build("zb-h1", num_ranks=3, num_microbatches=num_microbatches))


def test_batches_of_any_size_are_gathered() -> None:
    transports = Hub(3, timeout=real_seconds(30)).transports()
    for microbatches in (4, 2, 4):
        batch = simulated_batch(table(microbatches), CostModel(message=0.1))
        with ThreadPoolExecutor() as pool:
            gathered = pool.map(gather_trace, transports, [table] * 3, batch)
        assert list(gathered) == [batch, None, None]


def test_only_times_are_sent() -> None:
    schedule = table(3)
    events = list(simulated_batch(schedule, CostModel(message=0.1))[1])
    packed = pack(events)
    assert packed.shape == (3 * len(schedule.actions[1]),)
    assert unpack(schedule.actions[1], packed) == events
    assert num_microbatches(events) == 3


def test_a_long_run_leaves_its_last_batches() -> None:
    trace = Trace(keep=3)
    for batch in range(10):
        trace.begin()
        reached = trace.clock.mark()
        trace.add(Action.parse(f"0F{batch}"), reached, trace.clock.mark(), trace.clock.mark())
        trace.end()
    trace.begin()  # one that hasn't ended doesn't count
    assert [[str(event.action) for event in events] for events in trace.batches] == [["0F7"], ["0F8"], ["0F9"]]
    assert all(event.reached <= event.start <= event.end for events in trace.batches for event in events)


class DeviceClock(Clock):
    """A clock whose marks are numbers, and which knows how often it was waited for."""

    def __init__(self) -> None:
        self.marks = 0
        self.waits = 0

    @override
    def mark(self) -> int:
        self.marks += 1
        return self.marks

    @override
    def seconds(self, marks: Sequence[int]) -> list[float]:
        self.waits += 1
        return [mark / 2 for mark in marks]


def test_times_of_a_device_are_read_once_and_only_if_somebody_asks() -> None:
    clock = DeviceClock()
    trace = Trace(clock, keep=2)
    for _ in range(3):
        trace.begin()
        trace.add(Action.parse("0F0"), clock.mark(), clock.mark(), clock.mark())
        trace.end()
    assert clock.waits == 0, "training never waits"
    batches = trace.batches
    assert trace.batches == batches == [[event("0F0", 2.0, 2.5, 3.0)], [event("0F0", 3.5, 4.0, 4.5)]]
    assert clock.waits == 2

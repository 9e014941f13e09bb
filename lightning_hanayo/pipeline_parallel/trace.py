"""Records when each action of the last batches ran on this rank, and gathers a batch's records on pipeline rank 0.

rank 0   batch 50 | posts receives | batch 51 | waits for them: received long ago
rank 1   batch 50 | sends          | batch 51 |             |reached start end| of each action, in the table's order

All ranks' traces give a timeline, and the costs that a simulation needs to predict it. In traces of torch's profiler
actions and blocks are ranges.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import inf
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import profiler

from lightning_hanayo.clock import Clock, HostClock
from lightning_hanayo.monitor.waiting import Waiting
from lightning_hanayo.pipeline_parallel.transport import Transport
from lightning_hanayo.schedule import Action, CostModel, Kind, Schedule, Span, Timeline
from lightning_hanayo.schedule.table import producers

_TAG = (1 << 31) - 1
"""no message of a batch has this tag"""


@dataclass(slots=True)
class Event:
    """One action on this rank. Times are seconds of `time.perf_counter`, which processes on one machine share.

    On a GPU they are those of the device: it reaches an action, waits for its message, and ends it, while the host is
    ahead of it.
    """

    action: Action
    reached: float
    """when the rank got to the action, and began to wait for its message"""
    start: float
    """when its message was received"""
    end: float


BatchTrace = Sequence[Sequence[Event]]
"""One batch's events, one list for each pipeline rank."""


@dataclass(eq=False, repr=False)
class RecordedBatch:
    """The actions of one batch, and a clock's marks: reached, start and end of each of them."""

    clock: Clock
    actions: list[Action] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)

    @cached_property
    def events(self) -> list[Event]:
        """When the actions ran. Waits until the device has run them: call it a batch later."""
        times = iter(self.clock.seconds(self.marks))
        self.marks = []
        return [Event(action, *three) for action, *three in zip(self.actions, times, times, times, strict=True)]


class Trace:
    """The last `keep` training batches, oldest first. Marks are made while a batch runs, and read when it is asked for.

    `clock` is that of the device that runs the batches.
    """

    def __init__(self, clock: Clock | None = None, keep: int = 16) -> None:
        self.clock = HostClock() if clock is None else clock
        self.recorded: deque[RecordedBatch] = deque(maxlen=keep)
        self._current = RecordedBatch(self.clock)

    @property
    def batches(self) -> list[list[Event]]:
        """The events of all batches that are kept. Waits until the device has run the last one."""
        return [batch.events for batch in self.recorded]

    def begin(self) -> None:
        """Start a batch."""
        self._current = RecordedBatch(self.clock)

    def add(self, action: Action, reached: Any, start: Any, end: Any) -> None:
        """Record an action by the clock's marks, in the order of the table."""
        self._current.actions.append(action)
        self._current.marks += (reached, start, end)

    def end(self) -> None:
        """Keep the batch."""
        self.recorded.append(self._current)


def gather_trace(transport: Transport, table: Callable[[int], Schedule], events: Sequence[Event]) -> BatchTrace | None:
    """The events of a batch of all ranks, on rank 0; None elsewhere. Called by all ranks of the pipeline.

    `table` returns the schedule of a batch of that many micro-batches, which gives each rank's order of events.
    """
    with Waiting("the times of a batch", None):
        if transport.rank > 0:
            transport.send(0, _TAG, pack(events)).wait()
            return None
        found = [events]
        for rank, row in enumerate(table(num_microbatches(events)).actions[1:], 1):
            times = torch.empty(3 * len(row), dtype=torch.float64)
            transport.receive(rank, _TAG, times).wait()
            found.append(unpack(row, times))
        return found


def pack(events: Sequence[Event]) -> Tensor:
    """Return the times: [3 * events], float64. The actions are those of the table."""
    return torch.tensor([(e.reached, e.start, e.end) for e in events], dtype=torch.float64).flatten()


def unpack(actions: Sequence[Action], times: Tensor) -> list[Event]:
    """Return the events that `pack` was given."""
    return [Event(action, *three) for action, three in zip(actions, times.view(-1, 3).tolist(), strict=True)]


def num_microbatches(events: Sequence[Event]) -> int:
    """Return the number of micro-batches of a batch, from one rank's events: every rank works on each of them."""
    return 1 + max(event.action.microbatch or 0 for event in events)


MIN_WAIT = 5e-5
"""seconds: with shorter waits, the delay of a message does not tell how long the message took"""


@dataclass(frozen=True, slots=True)
class MessageTiming:
    """The two events of a message: `sent` made it, `received` waited for it.

    sender     |  sent  |----------.
    receiver   ...| reached         `->| start  received  |
    """

    sender: int
    sent: Event
    receiver: int
    received: Event

    @property
    def waited(self) -> float:
        """Seconds for which the receiver waited."""
        return self.received.start - self.received.reached

    @property
    def delay(self) -> float:
        """Seconds from the sender's end to the receiver's start: how long the message took, if the receiver waited."""
        return max(0.0, self.received.start - self.sent.end)

    @property
    def exposed(self) -> float:
        """Seconds for which the receiver waited after the sender had finished."""
        return max(0.0, self.received.start - max(self.received.reached, self.sent.end))


def message_timings(schedule: Schedule, batch: BatchTrace) -> Iterator[MessageTiming]:
    """Yield all messages of a batch that ran by `schedule`."""
    for (sender, i), (receiver, j) in _message_ends(schedule):
        yield MessageTiming(sender, batch[sender][i], receiver, batch[receiver][j])


Position = tuple[int, int]
"""a rank, and an index in its row of the schedule"""


@lru_cache(maxsize=8)
def _message_ends(schedule: Schedule) -> tuple[tuple[Position, Position], ...]:
    """The positions of each message's sender and receiver."""
    rows = schedule.actions
    position = {action: (rank, number) for rank, row in enumerate(rows) for number, action in enumerate(row)}
    ends = ((position[sent], position[received]) for received, sent in producers(schedule).items())
    return tuple((sent, received) for sent, received in ends if sent[0] != received[0])


def on_one_clock(schedule: Schedule, batch: BatchTrace) -> BatchTrace:
    """Return the batch with all times on rank 0's clock: the clocks of different machines do not start together.

    No message can be received before it was sent. If rank 1's times plus `offset` are rank 0's:

        rank 0   0F0 |e -------.                .------> s| 0B0      e <= s' + offset,  e' + offset <= s
        rank 1                  `-> s'| ... |e'                      so  e - s' <= offset <= s - e', for every message

    Processes on one machine share a clock: an offset of 0 is possible there, and the times stay as they are. Across
    machines each rank's clock is set relative to the rank before it, to the middle of the range that the batch's
    messages allow. The error is at most half the time that the two fastest messages, one in each direction, took
    together.
    """
    return [
        [replace(e, reached=e.reached + offset, start=e.start + offset, end=e.end + offset) for e in events]
        if offset
        else events
        for events, offset in zip(batch, offsets(len(batch), message_timings(schedule, batch)), strict=True)
    ]


def offsets(num_ranks: int, messages: Iterable[MessageTiming]) -> list[float]:
    """Return the seconds to add to each rank's times."""
    least: dict[tuple[int, int], float] = defaultdict(lambda: -inf)
    for one in messages:
        pair = (one.sender, one.receiver)
        least[pair] = max(least[pair], one.sent.end - one.received.start)
    found = [0.0]
    for rank in range(1, num_ranks):
        low, high = least[rank - 1, rank], -least[rank, rank - 1]
        # 0 if it is possible, or if messages went in one direction only; otherwise the middle
        found.append(found[-1] + (0.0 if low <= 0.0 <= high or inf in (-low, high) else (low + high) / 2))
    return found


def median_batch(batches: Sequence[BatchTrace]) -> BatchTrace:
    """Return the batch with the median duration."""
    return sorted(batches, key=lambda batch: _end(batch) - _begin(batch))[len(batches) // 2]


def timeline_of(schedule: Schedule, *batches: BatchTrace) -> Timeline:
    """Return the timeline of all batches, in seconds from the first action; each batch is one step."""
    begin = min(map(_begin, batches))
    spans = [Span(rank, event.action, event.start - begin, event.end - begin)
             for batch in batches for rank, events in enumerate(batch) for event in events]  # fmt: skip
    return Timeline.of(schedule, spans, len(batches))


def waits_of(*batches: BatchTrace) -> list[Span]:
    """Return when ranks waited for a message, and for which action, on the same time axis as `timeline_of`."""
    begin = min(map(_begin, batches))
    return [Span(rank, event.action, max(0.0, event.reached - begin), event.start - begin)
            for batch in batches for rank, events in enumerate(batch) for event in events
            if event.start - event.reached > MIN_WAIT and event.start > begin]  # fmt: skip


def costs_of(schedule: Schedule, batches: Sequence[BatchTrace]) -> CostModel:
    """Return each stage's mean times and the message delay, in seconds. A whole backward counts half for each part."""
    means = stage_times(batches, {action for pair in schedule.pairs for action in pair})

    def per_stage(kind: Kind) -> tuple[float, ...]:
        whole = 0.0 if kind is Kind.F else 0.5
        stages = range(schedule.num_stages)
        return tuple(means.get((stage, kind), whole * means.get((stage, Kind.B), 0.0)) for stage in stages)

    forward, backward_input, backward_weight = map(per_stage, (Kind.F, Kind.I, Kind.W))
    return CostModel(forward, backward_input, backward_weight, message=message_delay(schedule, batches))


def message_delay(schedule: Schedule, batches: Sequence[BatchTrace]) -> float:
    """Return T_C in seconds: from the end of an action to the start of one on another rank that waited for it."""
    messages = (message for batch in batches for message in message_timings(schedule, batch))
    delays = [message.delay for message in messages if message.waited > MIN_WAIT]
    return median(delays) if delays else 0.0


def exposed_communication(schedule: Schedule, batch: BatchTrace) -> float:
    """Return the share of all ranks' time in which they waited for messages whose sender had already finished.

    A rank's wait counts from the time it reached the action, or the sender's end if that is later, until it received
    the message. The rest of the bubble is due to the schedule, uneven stages, and the time between actions. The
    gradient all-reduce is not counted.
    """
    exposed = sum(message.exposed for message in message_timings(schedule, batch))
    return exposed / (len(batch) * (_end(batch) - _begin(batch)))


def stage_times(batches: Sequence[BatchTrace], in_pairs: Collection[Action] = ()) -> dict[tuple[int, Kind], float]:
    """Return the mean seconds of each stage's actions of each kind, over micro-batches and batches.

    Actions that ran in pairs, and so longer than alone, count only where all actions of a stage and kind did.
    """
    alone: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    paired: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for event in (event for batch in batches for events in batch for event in events):
        durations = paired if event.action in in_pairs else alone
        durations[event.action.stage, event.action.kind].append(event.end - event.start)
    return {key: fmean(values) for key, values in (paired | alone).items()}


def _begin(batch: BatchTrace) -> float:
    return min(event.start for events in batch for event in events)


def _end(batch: BatchTrace) -> float:
    return max(event.end for events in batch for event in events)


RANGE = "_hanayo_range"
"""the attribute of a block with the name that a profiler of the user's has given it"""


def is_profiling() -> bool:
    """Whether torch's profiler is on; `torch.autograd._profiler_enabled` is false if it records all threads."""
    return profiler._is_profiler_enabled


def action_range(action: Action) -> AbstractContextManager[object]:
    """For torch's profiler, a range such as "F stage 3 micro-batch 2"."""
    return profiler.record_function(f"{action.kind} stage {action.stage} micro-batch {action.microbatch}")


def block_range(block: nn.Module) -> AbstractContextManager[object]:
    """For torch's profiler, a range with the block's name, if it has one."""
    return profiler.record_function(vars(block)[RANGE]) if RANGE in vars(block) else nullcontext()

"""The collection: one batch's events from all ranks on pipeline rank 0, brought there while training goes on.

rank 0   batch 50 | posts receives | batch 51 | takes them: there long since
rank 1   batch 50 | sends          | batch 51 |             |asked start end| of each action, in the table's order
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_hanayo.runtime.comm.transport import Transport, Work
from lightning_hanayo.runtime.profiling.message_timing import BatchTrace
from lightning_hanayo.runtime.profiling.trace import Event
from lightning_hanayo.schedule import Action, Schedule

_TAG = (1 << 31) - 1
"""no message of a batch has it"""


class TraceGather:
    """Brings traces to rank 0. All ranks of the pipeline `start` for the same batches and `take` before the next.

    Args:
        transport: among the ranks of the pipeline.
        table: the schedule of a batch of that many micro-batches, which says whose events come in which order.
    """

    def __init__(self, transport: Transport, table: Callable[[int], Schedule]) -> None:
        self._transport = transport
        self._table = table
        self._moving: list[tuple[Tensor, Work]] = []
        self._own: Sequence[Event] = ()

    def start(self, events: Sequence[Event]) -> None:
        """Send this rank's events of a batch, on rank 0 make room for the others'. Waits for nothing."""
        self._own = events
        if self._transport.rank > 0:
            buffer = pack(events)
            self._moving = [(buffer, self._transport.send(0, _TAG, buffer))]
            return
        rows = self._table(num_microbatches(events)).actions
        buffers = [torch.empty(3 * len(row), dtype=torch.float64) for row in rows[1:]]
        self._moving = [(b, self._transport.receive(rank, _TAG, b)) for rank, b in enumerate(buffers, 1)]

    def finish(self) -> BatchTrace | None:
        """What was started, on rank 0; None elsewhere, and if nothing was. Waits where it is still under way."""
        own, moving = self._own, self._moving
        self.forget()
        for _, work in moving:
            work.wait()
        if not own or self._transport.rank > 0:
            return None
        rows = self._table(num_microbatches(own)).actions[1:]
        return [own, *(unpack(row, buffer) for row, (buffer, _) in zip(rows, moving, strict=True))]

    def forget(self) -> None:
        """Drop what is under way, after a failure."""
        self._own, self._moving = (), []


def pack(events: Sequence[Event]) -> Tensor:
    """The times alone: [3 * events], float64. The actions are the table's."""
    return torch.tensor([(e.reached, e.start, e.end) for e in events], dtype=torch.float64).flatten()


def unpack(actions: Sequence[Action], times: Tensor) -> list[Event]:
    """The events that `pack` took apart."""
    return [Event(action, *three) for action, three in zip(actions, times.view(-1, 3).tolist(), strict=True)]


def num_microbatches(events: Sequence[Event]) -> int:
    """Of the batch that these are one rank's events of: each rank has a part in every micro-batch."""
    return 1 + max(event.action.microbatch or 0 for event in events)

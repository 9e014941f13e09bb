"""The point-to-point channel: sends messages between stages, at most two at a time to each rank.

    rank 0    send m0    send m1    wait for m0, send m2    wait for m1, send m3
    rank 1    receive m0 receive m1              receive m2              receive m3

Each message on its way holds a buffer, which is free when its sender has waited for it. A rank posts its receives where
the messages are sent (`schedule/passes/communication.py`), so this takes no time unless a rank is late.

`headers.py` says how a message is put into buffers whose sizes both ranks know.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from lightning_hanayo.monitor.hangs.waiting import Waiting
from lightning_hanayo.runtime.comm.codec import SendBuffer
from lightning_hanayo.runtime.comm.headers import (
    MAX_SPARE_BUFFERS,
    Agreement,
    Headers,
    HeadersAhead,
    HeadersInBuffers,
    PendingSend,
)
from lightning_hanayo.runtime.comm.message import Message, MessageKey
from lightning_hanayo.runtime.comm.transport import Transport

MAX_SIGNATURES = 64
"""how many signatures' specs are kept: those of the latest batches"""
MAX_IN_FLIGHT = 2
"""how many messages may be on their way to one rank, each in a buffer of its own"""


class PointToPointChannel:
    """Sends and receives messages over a transport. Call `begin_batch` for each batch, `finish` after the last one.

    Headers are sent as messages of their own if `separate_headers`; None: where messages aren't in the host's
    memory, or have channels of their own.
    """

    def __init__(self, transport: Transport, *, separate_headers: bool | None = None) -> None:
        self.transport = transport
        if separate_headers is None:
            separate_headers = transport.device.type != "cpu" or transport.host is not transport
        self._headers: Headers = (HeadersAhead if separate_headers else HeadersInBuffers)(transport)
        self._agreements: dict[int, Agreement] = {}
        self._receives: dict[MessageKey, Callable[[], Message]] = {}
        self._sends: defaultdict[int, deque[Sequence[PendingSend]]] = defaultdict(deque)
        self._late: list[PendingSend] = []
        self._late_before: list[PendingSend] = []

    def begin_batch(self, signature: int) -> None:
        """Start a batch. All ranks give the same `signature`, so they also drop the same old ones.

        Messages of the batch before may still be under way: a rank receives them when it reaches that point of its
        program, and nothing waits for that at the end of a batch. What is received late is waited for a batch later.
        """
        self._wait(self._late_before)
        self._late_before, self._late = self._late, []
        agreement = self._agreements.pop(signature, Agreement())
        self._headers.agreement = self._agreements[signature] = agreement
        if len(self._agreements) > MAX_SIGNATURES:
            self._agreements.pop(next(iter(self._agreements)))
            self._headers.drop_buffers()

    def start_transfers(
        self, sends: Sequence[tuple[MessageKey, int, Message]], receives: Sequence[tuple[MessageKey, int]]
    ) -> None:
        """Start sends, then receives; each `int` is the other rank.

        It blocks while `MAX_IN_FLIGHT` messages are on their way to a rank (with a device: until that rank's host has
        posted them), and with a device for the spec of a message that is new. Neither can hang: a receive is posted
        where its message is sent in one sequence of all ranks' actions.
        """
        for key, peer, message in sends:
            in_flight = self._sends[peer]
            while len(in_flight) >= MAX_IN_FLIGHT:
                self._wait(in_flight.popleft())
            sending = self._headers.send(key, peer, message)
            in_flight.append(sending.posted)
            self._late += sending.late
        for key, peer in receives:
            self._receives[key] = self._headers.start_receive(key, peer)

    def wait_receive(self, key: MessageKey) -> Message:
        """Wait for the message of `key`, whose receive has been started, and return it."""
        with Waiting(key, None):
            return self._receives.pop(key)()

    def finish(self) -> None:
        """Wait until all messages are sent."""
        for in_flight in self._sends.values():
            while in_flight:
                self._wait(in_flight.popleft())
        self._wait([*self._late_before, *self._late])
        self._late_before, self._late = [], []

    def forget(self) -> None:
        """Drop all that is under way, after a failure."""
        self._receives.clear()
        self._sends.clear()
        self._late_before, self._late = [], []

    def _wait(self, sent: Sequence[PendingSend]) -> None:
        for buffer, work in sent:
            work.wait()
            if isinstance(buffer, SendBuffer):
                self._headers.recycle(buffer)


def most_buffer_bytes(sends: Sequence[tuple[Hashable, int]], num_bytes: Mapping[Any, int], *, keeps_spare: bool) -> int:
    """The most bytes of buffers that a channel holds if it repeats these sends batch after batch.

    Args:
        sends: of a batch, in order: which message it is, without its micro-batch, and the other rank.
        num_bytes: of each such message.
        keeps_spare: whether buffers are used again, as on the CPU.
    """
    in_flight: defaultdict[int, deque[Hashable]] = defaultdict(deque)
    spare: Counter[Hashable] = Counter()
    held = most = 0
    for message, peer in [*sends, *sends, *sends]:
        if len(in_flight[peer]) >= MAX_IN_FLIGHT:
            sent = in_flight[peer].popleft()
            is_kept = keeps_spare and spare[sent] < MAX_SPARE_BUFFERS
            spare[sent] += is_kept
            held -= 0 if is_kept else num_bytes[sent]
        is_new = not spare[message]
        spare[message] -= not is_new
        held += num_bytes[message] * is_new
        most = max(most, held)
        in_flight[peer].append(message)
    return most

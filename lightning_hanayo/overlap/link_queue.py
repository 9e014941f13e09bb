"""The link queue: puts the collectives of one rank on the wire one at a time, in the order in which they start.

    action 0     start a                  start c      wait for a
    action 1               start b                                      the order of turns: the same on all ranks
    link               | a          | b             | c           |

Two collectives at a time would share the link, so that both arrive late. A thread of the queue's own puts them on the
wire.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import override

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.overlap.turns import DeviceTurns, Worker


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> object:
        """Block until the buffer is sent, or filled."""


@dataclass(eq=False, repr=False, slots=True)
class Ticket:
    """A collective in the queue, or on the wire."""

    turns: DeviceTurns
    post: Callable[[], Work] | None
    starter: tuple[int, int]
    """the action that has started it"""
    _done: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None

    def wait(self) -> None:
        """Block until the collective has ended; in a pair the other action has the device before that."""
        self.turns.wait(self._block, self.starter)

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def carry(self) -> None:
        """Put it on the wire, and wait for it. Called by the queue's thread."""
        try:
            post, self.post = self.post, None  # frees the tensors that it has sent
            if post is not None:
                post().wait()
        except BaseException as error:  # raised by who waits for it
            self._error = error
        self._done.set()

    def cancel(self, error: BaseException) -> None:
        """Let who waits for it go on, with this error."""
        if not self.is_done:
            self.post, self._error = None, error
            self._done.set()

    def _block(self) -> None:
        self._done.wait()
        if self._error is not None:
            raise self._error


@dataclass(eq=False, repr=False)
class DeviceTicket:
    """A collective in a device's own queue."""

    turns: DeviceTurns
    work: Work
    starter: tuple[int, int]

    def wait(self) -> None:
        """Let work that comes later in the stream wait for the collective; the other action has the device before."""
        self.turns.wait(self.work.wait, self.starter)


class LinkQueue:
    """One rank's queue, for one link. All ranks that share collectives give their queues the same ones in one order."""

    def __init__(self, turns: DeviceTurns | None = None) -> None:
        self.turns = DeviceTurns() if turns is None else turns
        self.turns.on_failure = self.cancel
        self._link = Worker("hanayo-link")
        self._under_way: list[Ticket] = []

    def start(self, post: Callable[[], Work]) -> Work:
        """Start a collective: `post` puts it on the wire. The queue's thread calls it once those before it have ended.

        Called by the action that has the device.
        """
        ticket = Ticket(self.turns, post, self.turns.action)
        self._under_way = [*(one for one in self._under_way if not one.is_done), ticket]
        self._link.submit(ticket.carry)
        return ticket

    def cancel(self) -> None:
        """An action has failed: nothing on the wire holds up the other one."""
        error = HanayoError("the other one of two actions that ran at once has failed")
        for ticket in self._under_way:
            ticket.cancel(error)
        self._under_way.clear()

    def close(self, timeout: float = 5.0) -> None:
        """End the queue's thread, and that of second actions; wait for so many seconds until they have ended."""
        self.turns.close(timeout)
        self._link.close(timeout)


class DeviceLink(LinkQueue):
    """For collectives that a device queues itself (NCCL): they start at once, in the order in which they are called.

    Hosts don't wait for them, so both actions put their work into one stream: each time an action would wait for a
    collective, the other one goes on, and only later work in the stream waits for it.
    """

    @override
    def start(self, post: Callable[[], Work]) -> Work:
        return DeviceTicket(self.turns, post(), self.turns.action)

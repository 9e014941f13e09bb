"""The link queue: puts the collectives of one rank on the wire one at a time, in an order that all ranks share.

    actions     start a   start b          start c      wait for b
    queue            | a          | b             | c           |

Two collectives at a time would share the link, so that both arrive late. Of a pair of actions the order can be planned;
else it is that in which they start. A thread of the queue's own puts them on the wire.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, ClassVar, Protocol

from typing_extensions import override

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.overlap.pair_time import Order, Segment
from lightning_hanayo.overlap.turns import DeviceTurns, Worker


class Work(Protocol):
    """A transfer under way."""

    def wait(self) -> Any:
        """Block until the transfer has ended."""


@dataclass(eq=False, repr=False, slots=True)
class Ticket:
    """A collective in the queue, or on the wire."""

    queue: "LinkQueue"
    post: Callable[[], Work] | None
    number: int = 0
    """among those of its action"""
    recorded: "Recording | None" = None
    """of its action"""
    seconds: float = 0.0
    """how long the link carried it"""
    _done: threading.Event = field(default_factory=threading.Event)
    _error: BaseException | None = None
    _work: Work | None = None

    def wait(self) -> None:
        """Block until the collective has ended; in a pair the other action has the device meanwhile."""
        self.queue.wait(self)

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._done.is_set()

    def block(self) -> None:
        """Block until it has ended, and raise its error."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._work is not None:
            self._work.wait()
            self._work = None

    def carry(self) -> None:
        """Put it on the wire, and wait for it. Called by the queue's thread."""
        begin = perf_counter()
        try:
            post, self.post = self.post, None  # frees the tensors that it has sent
            if post is not None:
                post().wait()
        except BaseException as error:  # raised by who waits for it
            self._error = error
        self.seconds = perf_counter() - begin
        self._done.set()

    def cancel(self, error: BaseException) -> None:
        """Let who waits for it go on, with this error."""
        if not self.is_done:
            self.post, self._error = None, error
            self._done.set()


class Recording:
    """Records one action as it runs: when it computes, and which collectives it starts and waits for."""

    def __init__(self) -> None:
        self._parts: list[tuple[float, Ticket | None, int | None]] = []
        self._mark = perf_counter()
        self._computed = 0.0
        """seconds before that"""

    def wait(self, ticket: Ticket) -> None:
        """It needs the result of a collective. That of one which an earlier action has started is taken to be there."""
        if ticket.recorded is self:
            self.add(wait=ticket.number)
        else:
            self._computed += perf_counter() - self._mark

    def go_on(self) -> None:
        """It has the device again."""
        self._mark = perf_counter()

    def segments(self) -> tuple[Segment, ...]:
        """The action's segments. Call it when its collectives have ended."""
        return tuple(
            Segment(compute, None if ticket is None else ticket.seconds, wait) for compute, ticket, wait in self._parts
        )

    def add(self, ticket: Ticket | None = None, wait: int | None = None) -> None:
        """It has computed until now: then it starts a collective, waits for one, or ends."""
        now = perf_counter()
        self._parts.append((now - self._mark + self._computed, ticket, wait))
        self._mark, self._computed = now, 0.0


class LinkQueue:
    """One rank's queue, for one link. The action that has the device starts collectives and waits for them.

    All ranks that share collectives give their queues the same collectives in the same order, or the same plans.
    """

    keeps_plans: ClassVar[bool] = True
    """whether collectives go on the wire in a planned order, whichever starts first"""

    def __init__(self, turns: DeviceTurns | None = None) -> None:
        self.turns = DeviceTurns() if turns is None else turns
        self.turns.on_failure = self.cancel
        self.recordings: dict[int, Recording] = {}
        """by slot: of the actions that run now"""
        self._link = Worker("hanayo-link")
        self._plan: Order | None = None
        self._next = 0
        """the place in the plan of the collective that the link carries next"""
        self._numbers: defaultdict[int, int] = defaultdict(int)
        self._held: dict[tuple[int, int], Ticket] = {}
        """started, but not yet carried: their turn hasn't come"""
        self._under_way: list[Ticket] = []
        self._awaited: dict[int, Ticket] = {}
        """by slot: the collective that an action waits for"""
        self._ended: set[int] = set()
        """the actions of the pair that have ended"""

    def start(self, post: Callable[[], Work]) -> Ticket:
        """Start a collective: `post` puts it on the wire. The queue's thread calls it when its turn has come.

        Raises:
            HanayoError: it wasn't planned.
        """
        ticket, slot = Ticket(self, post), self.turns.slot
        ticket.number = self._numbers[slot]
        self._numbers[slot] += 1
        if (recording := self.recordings.get(slot)) is not None:
            ticket.recorded = recording
            recording.add(ticket)
        if self._plan is None:
            self._put(ticket)
            return ticket
        if (slot, ticket.number) not in self._plan:
            raise HanayoError(_unplanned(self._plan, self._numbers))
        self._held[slot, ticket.number] = ticket
        # what was held up by this one may go now, too
        while self._next < len(self._plan) and self._plan[self._next] in self._held:
            self._put(self._held.pop(self._plan[self._next]))
            self._next += 1
        self.turns.offer()
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """Wait until the collective has ended; in a pair the other action has the device meanwhile.

        Raises:
            HanayoError: it would never be carried: both actions have started other collectives than planned.
        """
        slot = self.turns.slot
        recording = self.recordings.get(slot)
        if recording is not None:
            recording.wait(ticket)
        self._awaited[slot] = ticket
        self._check_progress()
        self.turns.wait(lambda: ticket.is_done, ticket.block)
        self._awaited.pop(slot, None)
        if recording is not None:
            recording.go_on()

    def record(self, slot: int = 0) -> Recording:
        """Record the action that begins now in this slot."""
        self.recordings[slot] = made = Recording()
        self._numbers[slot] = 0
        return made

    def begin_pair(self, plan: Order | None) -> None:
        """Two actions begin. `plan`: the order of all their collectives; None: as they start."""
        self._numbers.clear()
        self._held.clear()
        self._awaited.clear()
        self._ended.clear()
        self._plan, self._next = plan, 0

    def end_pair(self) -> None:
        """Both have ended."""
        self._plan = None
        self.recordings.clear()

    def check_action(self, slot: int) -> None:
        """An action of a pair has ended: check that it has started all of its collectives that were planned.

        Raises:
            HanayoError: it hasn't, so that those behind them would never be carried.
        """
        if self._plan is not None and sum(one == slot for one, _ in self._plan) != self._numbers[slot]:
            raise HanayoError(_unplanned(self._plan, self._numbers))
        self._ended.add(slot)
        self._check_progress()

    def _check_progress(self) -> None:
        """Check that held collectives can still be carried: an action goes on that may start those before them.

        Raises:
            HanayoError: each action has ended, or waits for a collective that is held.
        """
        held = self._held.values()
        if (
            self._plan is not None
            and held
            and all(slot in self._ended or self._awaited.get(slot) in held for slot in (0, 1))
        ):
            raise HanayoError(_unplanned(self._plan, self._numbers))

    def cancel(self) -> None:
        """An action has failed: nothing that is held or on the wire holds up the other one."""
        error = HanayoError("the other one of two actions that ran at once has failed")
        for ticket in (*self._held.values(), *self._under_way):
            ticket.cancel(error)
        self._held.clear()
        self._under_way.clear()

    def close(self, timeout: float = 5.0) -> None:
        """End the queue's thread, and that of second actions; wait for so many seconds until they have ended."""
        self.turns.close(timeout)
        self._link.close(timeout)

    def _put(self, ticket: Ticket) -> None:
        self._under_way = [one for one in self._under_way if not one.is_done]
        self._under_way.append(ticket)
        self._link.submit(ticket.carry)


class DeviceLink(LinkQueue):
    """For collectives that a device queues itself (NCCL): they start at once, in the order in which they are called.

    Hosts don't wait for them, so both actions put their work into one stream: each time an action would wait for a
    collective, the other one goes on, and only later work in the stream waits for it.
    """

    keeps_plans = False

    @override
    def start(self, post: Callable[[], Work]) -> Ticket:
        ticket = Ticket(self, post)
        ticket.post, ticket._work = None, post()  # which `block` waits for itself
        ticket._done.set()
        return ticket


def _unplanned(plan: Order, numbers: defaultdict[int, int]) -> str:
    planned, started = ([sum(one == slot for one, _ in plan) for slot in (0, 1)], [numbers[slot] for slot in (0, 1)])
    return (
        f"two actions that ran at once were planned with {planned} collectives in an order, and started {started}. "
        f"Blocks whose collectives depend on their data can't run in pairs: pairs=False."
    )

"""`Monitor`: the public interface of a rank's monitor: broadcast, query, agree, and liveness of ranks.

monitor = Monitor(rank, num_ranks, place, address)              listens
monitor.connect(members, token)                                 all members, the same on all ranks
monitor.on("saved", lambda sender, step: print(sender, step))   in the monitor's thread
monitor.tell("saved", 12)                                       to all ranks
monitor.ask("position")                                         the answers of all ranks that answer in time
monitor.decide("who saves", rank)                               the same on all ranks
"""

import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from lightning_hanayo.monitor import processes
from lightning_hanayo.monitor.overlay import Json, Loop, Overlay, Timer, guarded
from lightning_hanayo.monitor.peers import Peer, Peers, State, Timing
from lightning_hanayo.monitor.processes import Member

Handler = Callable[[int, Json], object]
STOOD_STILL = 2.0
"""seconds for which this process could not run its monitor; silence of others in that time means nothing"""
GOODBYE = 0.5
"""seconds until the others have read a good-bye"""

_open: "weakref.WeakSet[Monitor]" = weakref.WeakSet()


class Monitor:
    """One rank's monitor, for the lifetime of the world's process group. In a world of one rank it has no thread.

    Args:
        rank: this one.
        num_ranks: of the world.
        place: of this rank, as messages name it.
        address: of this host, at which other ranks can reach it.
        timing: seconds; None: the usual ones. Tests give less.
    """

    def __init__(self, rank: int, num_ranks: int, place: str, address: str, timing: Timing | None = None) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._timing = timing or Timing()
        self._listener: socket.socket | None = None
        if num_ranks > 1:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._listener = socket.create_server((address, 0), family=family, backlog=128)
        port = 0 if self._listener is None else self._listener.getsockname()[1]
        pid = os.getpid()
        self.member = Member(rank, place, address, port, pid, processes.started(pid), processes.host())
        self.members: tuple[Member, ...] = (self.member,)
        """of all ranks, in their order"""
        self._handlers: dict[str, list[Handler]] = {}
        self._num_runs = count(1)
        self._is_closed = False
        self._loop = Loop()
        self._loop.on_standstill = self._on_standstill
        _open.add(self)

    def connect(self, members: Sequence[Member], token: str) -> None:
        """Link it with the other monitors. Called on all ranks with the same members; returns without waiting.

        Args:
            members: of all ranks, in their order.
            token: a secret of these ranks, so that no stranger is taken for one of them.
        """
        self.members = tuple(members)
        self._overlay = Overlay(
            self.rank,
            self.members,
            token,
            self._listener,
            self._loop,
            on_message=self._on_message,
            on_up=lambda rank: self._peers.on_up(rank),
            on_lost=self._on_lost,
        )
        self._peers = Peers(self.rank, self.members, self._loop, self._overlay, self._overlay.flood, self._timing)
        self._questions = Questions(self.rank, lambda: self._peers.running, self._overlay)
        self._verdicts = Verdicts(self.rank, lambda: self._peers.running, self._overlay.flood, self._timing.takeover)
        if self.num_ranks > 1:
            self._loop.call(self._begin)
            self._loop.start()

    @property
    def arbiter(self) -> int:
        """The rank that decides: the lowest one that runs, as far as this one knows."""
        return self._peers.running[0]

    def begin_run(self) -> int:
        """The number of the run that begins. It is the same on all ranks if all begin the same runs."""
        return next(self._num_runs)

    def state_of(self, rank: int) -> State:
        """How the rank's process is, as far as this one knows."""
        return self._peers.of(rank).state

    def peer(self, rank: int) -> Peer:
        """The same, with when that was observed, and how an ended process has ended."""
        return self._peers.of(rank)

    def tell(self, kind: str, content: Json) -> None:
        """Send a message to all ranks, this one too. From any thread; returns at once."""
        self._call(lambda: self._overlay.flood(kind, content))

    def on(self, kind: str, handler: Handler) -> Callable[[], None]:
        """Call `handler(sender, content)` for each message of this kind, in the monitor's thread: it must not block.

        Two kinds come from monitors: "state", {"rank", "state", "reason"}, once for each change that they observe, and
        "verdict", {"topic", "verdict"}, once for each topic, whose sender is the rank that has decided.

        Returns:
            A function that removes the handler.
        """
        handlers = self._handlers.setdefault(kind, [])
        handlers.append(handler)

        def remove() -> None:
            if handler in handlers:
                handlers.remove(handler)

        return remove

    def ask(self, question: str, content: Json = None, *, timeout: float = 1.0) -> dict[int, Json]:
        """Return the answers of the ranks that answer in time, this one's included. Not from the monitor's thread.

        It doesn't wait for ranks that have ended, are stopped, or silent.
        """
        pending = Pending()
        if not self._is_closed:
            self._call(lambda: self._questions.ask(question, content, pending))
            pending.is_complete.wait(timeout)
            self._call(lambda: self._questions.forget(pending))
        return dict(pending.answers)

    def answer(self, question: str, function: Callable[[Json], Json]) -> Callable[[], None]:
        """Answer a question with `function(content)`, called in the monitor's thread. It takes the place of another.

        Returns:
            A function that removes it.
        """
        return self._questions.answer(question, function)

    def decide(self, topic: str, proposal: Json, *, timeout: float = 10.0) -> Json:
        """Return the verdict, the same on all ranks: the proposal that came first. Not from the monitor's thread.

        After the timeout, and when the monitor is closed, it is this rank's own proposal.
        """
        self.propose(topic, proposal)
        verdict = None if self._is_closed else self._verdicts.wait(topic, timeout)
        return proposal if verdict is None else verdict

    def propose(self, topic: str, proposal: Json) -> None:
        """The same without waiting. From any thread; handlers of "verdict" hear of the verdict."""
        if self.verdict(topic) is None:
            self.tell("proposal", {"topic": topic, "proposal": proposal})

    def verdict(self, topic: str, *, wait: float = 0.0) -> Json | None:
        """The verdict; None if there is none yet, or none within the seconds that the caller waits for it."""
        return self._verdicts.wait(topic, wait) if wait else self._verdicts.get(topic)

    def every(self, seconds: float, function: Callable[[], object]) -> Callable[[], None]:
        """Call the function again and again, in the monitor's thread: it must not block. Not in a world of one rank.

        Returns:
            A function that removes it.
        """
        timer = Timer(seconds, function, repeats=True)
        self._call(lambda: self._loop.add(timer))
        return lambda: self._call(lambda: self._loop.cancel(timer))

    def close(self) -> None:
        """Say good-bye to the other ranks, and end the thread; again: do nothing. From any thread."""
        if self._is_closed:
            return
        self._is_closed = True
        _open.discard(self)
        if self._loop.is_started:
            self._verdicts.close()
            self._loop.call(self._say_goodbye)
            self._loop.join(2 * GOODBYE)
        elif self._listener is not None:
            self._listener.close()
        if not self._loop.is_started:
            self._loop.close_files()

    def leave_in_child(self) -> None:
        """In a forked process: close its copies of the files, so that the end of this one's links is seen."""
        self._is_closed = True
        self._loop.leave_in_child()
        if self._listener is not None:
            self._listener.close()

    def _call(self, function: Callable[[], object]) -> None:
        if self.num_ranks == 1:
            function()
        else:
            self._loop.call(function)

    def _begin(self) -> None:
        self._overlay.open()
        self._peers.open()
        self._loop.add(Timer(self._timing.ping, self._tick, repeats=True))

    def _tick(self) -> None:
        self._overlay.ping()
        self._peers.look()

    def _on_standstill(self, seconds: float) -> None:
        if seconds > STOOD_STILL:
            self._peers.restart_clocks()
        if seconds > self._timing.takeover / 2:
            self._verdicts.wait_for_others()

    def _on_message(self, message: dict[str, Json]) -> None:
        sender, kind, content = message["from"], message["kind"], message["content"]
        if kind == "proposal":
            self._verdicts.on_proposal(content)
            self._decide_soon()
        elif kind == "ask":
            self._questions.on_ask(message)
        elif kind == "reply":
            self._questions.on_reply(message)
        elif kind == "goodbye":
            self._on_state(sender, {"rank": sender, "state": "ended", "reason": "", "seconds": 0.0})
        elif kind == "state":
            self._on_state(sender, content)
        elif kind != "verdict" or self._verdicts.on_verdict(content):
            self._dispatch(kind, sender, content)

    def _on_state(self, sender: int, content: Json) -> None:
        if self._peers.on_state(sender, content):
            self._decide_soon()
            self._questions.check()
            self._dispatch("state", sender, content)

    def _dispatch(self, kind: str, sender: int, content: Json) -> None:
        for handler in tuple(self._handlers.get(kind, ())):
            guarded(handler, sender, content)

    def _decide_soon(self) -> None:
        """After this round, in which another rank's verdict may still be read; later, if others should have decided."""
        if self.num_ranks == 1:
            self._verdicts.decide_due()
        else:
            for waits in range(MOST_WAITS + 2):
                self._loop.later(waits * self._timing.takeover, self._verdicts.decide_due)

    def _on_lost(self, rank: int) -> None:
        if not self._is_closed:
            self._peers.on_lost(rank)
        elif not self._overlay.is_linked:
            self._end()

    def _say_goodbye(self) -> None:
        """The links are closed once the others have read it: closing them at once could take it from them."""
        self._overlay.flood("goodbye", None)
        self._overlay.finish()
        self._loop.later(GOODBYE, self._end)
        if not self._overlay.is_linked:
            self._end()

    def _end(self) -> None:
        self._overlay.close()
        self._peers.close()
        self._loop.end()


def _close_all() -> None:
    """At the end of the process."""
    for monitor in list(_open):
        monitor.close()


def _leave_in_child() -> None:
    """A forked process, such as a worker of a loader, has no part in its parent's monitor."""
    for monitor in list(_open):
        monitor.leave_in_child()
    _open.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_in_child)


class Pending:
    """A question of this rank that waits for answers."""

    def __init__(self) -> None:
        self.replied: set[int] = set()
        self.answers: dict[int, Any] = {}
        self.is_complete = threading.Event()


class Questions:
    """One rank's questions to all ranks, and its answers. It belongs to the loop's thread.

        rank 2    ask "position"   --flooded-->   each rank answers in its monitor's thread
                  {0: 12, 1: 12, 2: 13}   <--     on the way by which it heard the question

    Args:
        rank: this one.
        running: the ranks that are waited for.
        overlay: carries questions and answers.
    """

    def __init__(self, rank: int, running: Callable[[], list[int]], overlay: Overlay) -> None:
        self._rank, self._running, self._overlay = rank, running, overlay
        self._functions: dict[str, Callable[[Any], Any]] = {}
        self._pending: dict[tuple[int, int], Pending] = {}
        self._new: Pending | None = None

    def answer(self, question: str, function: Callable[[Any], Any]) -> Callable[[], None]:
        """Answer with this function. Returns a function that removes it. From any thread."""
        self._functions[question] = function

        def remove() -> None:
            if self._functions.get(question) is function:
                del self._functions[question]

        return remove

    def ask(self, question: str, content: Any, pending: Pending) -> None:
        """Ask all ranks; `pending` gets the answers."""
        self._new = pending  # this rank's own answer comes before the question's id is known
        message_id = self._overlay.flood("ask", {"question": question, "content": content})
        self._pending[message_id] = pending
        self._new = None

    def forget(self, pending: Pending) -> None:
        """No more answers are wanted."""
        self._pending = {message_id: one for message_id, one in self._pending.items() if one is not pending}

    def on_ask(self, message: dict[str, Any]) -> None:
        """Called with a question."""
        content = message["content"]
        function = self._functions.get(content["question"])
        answers: list[Any] = []
        if function is not None:
            guarded(lambda: answers.append(function(content["content"])))
        self._overlay.reply((message["from"], message["number"]), {"rank": self._rank, "answers": answers})

    def on_reply(self, message: dict[str, Any]) -> None:
        """Called with an answer to a question of this rank."""
        pending = self._pending.get(message["to"], self._new)
        if pending is not None:
            rank = message["content"]["rank"]
            pending.replied.add(rank)
            pending.answers.update((rank, answer) for answer in message["content"]["answers"])
            self.check()

    def check(self) -> None:
        """Let those go on whose questions all have answered that can."""
        running = set(self._running())
        for pending in (*self._pending.values(), self._new):
            if pending is not None and running <= pending.replied:
                pending.is_complete.set()


MOST_WAITS = 3
"""after so many ranks that don't answer, each rank decides for itself"""


@dataclass
class _Open:
    proposal: Any
    since: float


class Verdicts:
    """One verdict on each topic, the same on all ranks: the proposal that the arbiter gets first.

        rank 3    propose "failure": A   --+
                                           +-->  rank 0, the arbiter, gets A first:  verdict A, flooded to all
        rank 5    propose "failure": B   --+

    If the arbiter doesn't answer within a second, the next rank that runs decides, and so on, up to `MOST_WAITS` of
    them. It belongs to the loop's thread, but for `wait`, `get` and `closed`.

    Args:
        rank: this one.
        running: the ranks that run, in order.
        tell: floods a message.
        takeover: seconds that a rank has to decide.
    """

    def __init__(
        self, rank: int, running: Callable[[], list[int]], tell: Callable[[str, Any], object], takeover: float
    ) -> None:
        self._rank, self._running, self._tell, self._takeover = rank, running, tell, takeover
        self._open: dict[str, _Open] = {}
        self._known: dict[str, Any] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._not_before = 0.0

    def get(self, topic: str) -> Any:
        """The verdict; None before there is one."""
        return self._known.get(topic)

    def wait(self, topic: str, timeout: float) -> Any:
        """The verdict, once it is there; None if it doesn't come in time, or the monitor is closed."""
        with self._changed:
            self._changed.wait_for(lambda: topic in self._known or self._is_closed, timeout)
        return self.get(topic)

    def on_proposal(self, content: Any) -> None:
        """Called with the proposal of any rank."""
        topic = content["topic"]
        if topic not in self._known:
            self._open.setdefault(topic, _Open(content["proposal"], time.monotonic()))

    def on_verdict(self, content: Any) -> bool:
        """Called with a verdict; return whether it is the first about its topic, and so counts."""
        topic = content["topic"]
        self._open.pop(topic, None)
        if topic in self._known:
            return False
        with self._changed:
            self._known[topic] = content["verdict"]
            self._changed.notify_all()
        return True

    def decide_due(self) -> None:
        """Decide where it is this rank's turn. Called when proposals have come, and again while some are open."""
        now = time.monotonic()
        turn = min(self._running().index(self._rank), MOST_WAITS)  # 0: the arbiter, which decides at once
        for topic, one in list(self._open.items()):
            if now >= max(one.since + self._takeover * turn, self._not_before):
                self._tell("verdict", {"topic": topic, "verdict": one.proposal})

    def wait_for_others(self) -> None:
        """This rank could not decide for a while: others have, maybe. It waits until it has heard of that."""
        self._not_before = time.monotonic() + self._takeover

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

"""`Monitor`: the public interface of a rank's monitor: broadcast, query, agree, and liveness of ranks.

monitor = Monitor(rank, num_ranks, place, address)              listens
monitor.connect(members, token)                                 all members, the same on all ranks
monitor.on("saved", lambda sender, step: print(sender, step))   in the monitor's thread
monitor.tell("saved", 12)                                       to all ranks
monitor.ask("position")                                         the answers of all ranks that answer in time
monitor.decide("who saves", rank)                               the same on all ranks
"""

import asyncio
import atexit
import os
import selectors
import socket
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from lightning_hanayo.monitor import processes
from lightning_hanayo.monitor.overlay import Json, Overlay
from lightning_hanayo.monitor.peers import Peer, Peers, State, Timing
from lightning_hanayo.monitor.processes import Member

Handler = Callable[[int, Json], object]
STOOD_STILL = 2.0
"""seconds for which this process could not run its monitor; silence of others in that time means nothing"""
GOODBYE = 0.5
"""seconds until the others have read a good-bye"""
_ASK, _PAUSE = 0.5, 0.01
"""seconds to wait for answers, and between two questions"""
MOST_WAITS = 3
"""after so many ranks that don't decide, each rank decides for itself"""

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
        self._handlers: dict[str, dict[object, Handler]] = {}
        self._functions: dict[str, Callable[[Json], Json]] = {}
        self._replies: dict[int, dict[int, list[Json]]] = {}
        """to the questions of this rank, by the number of the question and the rank that replies"""
        self._changed = threading.Condition()
        """held while replies and verdicts change; other threads wait for them"""
        self._proposals: dict[str, tuple[Json, float]] = {}
        """the first proposal on a topic, and when it came, until there is a verdict"""
        self._verdicts: dict[str, Json] = {}
        """by topic"""
        self._decide_at = 0.0
        """before that, this rank doesn't decide: others may have, and it waits until it has heard of that"""
        self.run_numbers = count(1)
        """of the runs that begin: the same on all ranks if all begin the same runs"""
        self.runs_over: dict[int, int] = {}
        """the number of the last run that has ended, by rank: a rank may fail in the hooks after it"""
        self.on("run over", lambda sender, run: self.runs_over.update({sender: run}))
        self._is_closed = False
        self._leaves = asyncio.Event()
        self._selector: selectors.DefaultSelector | None = None
        self._loop: asyncio.SelectorEventLoop | None = None
        self._thread: threading.Thread | None = None
        _open.add(self)

    def connect(self, members: Sequence[Member], token: str) -> None:
        """Link it with the other monitors. Called on all ranks with the same members; returns without waiting.

        Args:
            members: of all ranks, in their order.
            token: a secret of these ranks, so that no stranger is taken for one of them.
        """
        self.members = tuple(members)
        self._overlay = Overlay(self.rank, self.members, token, self._on_message)
        self._peers = Peers(self.rank, self.members, self._overlay, self._timing)
        self._look_at, self._ping_at = time.monotonic(), 0.0
        if self.num_ranks > 1:
            self._selector = selectors.DefaultSelector()
            self._loop = asyncio.SelectorEventLoop(self._selector)
            self._thread = threading.Thread(target=self._run, args=(self._loop,), daemon=True, name="hanayo-monitor")
            self._thread.start()

    @property
    def arbiter(self) -> int:
        """The rank that decides: the lowest one that runs, as far as this one knows."""
        return self._peers.running[0]

    def state_of(self, rank: int) -> State:
        """How the rank's process is, as far as this one knows."""
        return self._peers.of(rank).state

    def peer(self, rank: int) -> Peer:
        """The same, with when that was observed, and how an ended process has ended."""
        return self._peers.of(rank)

    def tell(self, kind: str, content: Json) -> None:
        """Send a message to all ranks, this one too. From any thread; returns at once."""
        self._call(lambda: self._overlay.flood(kind, content))

    def on(self, kind: str, handler: Handler) -> Callable[[], object]:
        """Call `handler(sender, content)` for each message of this kind, in the monitor's thread: it must not block.

        Two kinds come from monitors: "state", {"rank", "state", "reason"}, once for each change that they observe, and
        "verdict", {"topic", "verdict"}, once for each topic, whose sender is the rank that has decided.

        Returns:
            A function that removes the handler.
        """
        handlers, key = self._handlers.setdefault(kind, {}), object()
        handlers[key] = handler
        return lambda: handlers.pop(key, None)

    def ask(self, question: str, content: Json = None, *, timeout: float = 1.0) -> dict[int, Json]:
        """Return the answers of the ranks that answer in time, this one's included. Not from the monitor's thread.

        It doesn't wait for ranks that have ended, are stopped, or silent.
        """
        replies: dict[int, list[Json]] = {}
        number = next(self._overlay.numbers)
        with self._changed:
            self._replies[number] = replies
        self._call(lambda: self._overlay.flood("ask", {"question": question, "content": content}, number))
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or replies.keys() >= {*self._peers.running}, timeout)
            del self._replies[number]
            return {rank: answer for rank, answers in replies.items() for answer in answers}

    def answer(self, question: str, function: Callable[[Json], Json]) -> None:
        """Answer a question with `function(content)`, called in the monitor's thread. It takes the place of another."""
        self._functions[question] = function

    def decide(self, topic: str, proposal: Json, *, timeout: float = 10.0) -> Json:
        """Return the verdict, the same on all ranks: the proposal that came first. Not from the monitor's thread.

            rank 3    propose "failure": A   --+
                                               +-->  rank 0, the arbiter, gets A first:  verdict A, flooded to all
            rank 5    propose "failure": B   --+

        If the arbiter doesn't answer within a second, the next rank that runs decides, and so on, up to `MOST_WAITS` of
        them. After the timeout, and when the monitor is closed, it is this rank's own proposal.
        """
        self.propose(topic, proposal)
        verdict = self.verdict(topic, wait=timeout)
        return proposal if verdict is None else verdict

    def propose(self, topic: str, proposal: Json) -> None:
        """The same without waiting. From any thread; handlers of "verdict" hear of the verdict."""
        if self.verdict(topic) is None:
            self.tell("proposal", {"topic": topic, "proposal": proposal})

    def verdict(self, topic: str, *, wait: float = 0.0) -> Json | None:
        """The verdict; None if there is none yet, or none within the seconds that the caller waits for it."""
        if wait:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or topic in self._verdicts, wait)
        return self._verdicts.get(topic)

    def settle(self, topic: str, judge: Callable[[dict[int, Json]], Json], *, within: float) -> Json:
        """Return a verdict on what the ranks answer to the question `topic`; the same on all. Called by any of them.

        Args:
            topic: of the question and of the verdict.
            judge: makes a proposal of the answers, by rank. A rank that has ended answers nothing.
            within: seconds until `judge` has to do without the ranks that don't answer.
        """
        answers: dict[int, Json] = {}
        deadline = time.monotonic() + within
        while (verdict := self.verdict(topic)) is None:
            answers |= self.ask(topic, timeout=_ASK)
            ended = {rank for rank in range(self.num_ranks) if self.peer(rank).state == "ended"}
            is_over = self._is_closed or time.monotonic() > deadline
            if is_over or len(answers.keys() | ended) == self.num_ranks:
                return self.decide(topic, judge(answers))
            time.sleep(_PAUSE)
        return verdict

    def every(self, seconds: float, function: Callable[[], object]) -> Callable[[], None]:
        """Call the function again and again, in the monitor's thread: it must not block. Not in a world of one rank.

        Returns:
            A function that removes it.
        """
        is_over, loop = threading.Event(), self._loop

        def call_and_repeat() -> None:
            if loop is not None and not is_over.is_set():
                loop.call_later(seconds, call_and_repeat)
                guarded(function)

        if loop is not None:
            self._call(lambda: loop.call_later(seconds, call_and_repeat))
        return is_over.set

    def wait_for_goodbyes(self, seconds: float) -> None:
        """Wait until all other ranks have closed their monitors, or ended. Not from the monitor's thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._peers.running == [self.rank], seconds)

    def close(self) -> None:
        """Say good-bye to the other ranks, and end the thread; again: do nothing. From any thread."""
        if self._is_closed:
            return
        self._is_closed = True
        _open.discard(self)
        with self._changed:
            self._changed.notify_all()
        if self._thread is not None:
            self._call(self._leaves.set)
            if threading.current_thread() is not self._thread:
                self._thread.join(2 * GOODBYE)
        elif self._listener is not None:
            self._listener.close()

    def leave_in_child(self) -> None:
        """In a forked process: give up its copies of the files, so that the end of this one's links is seen.

        Their numbers stay taken, by a file of no use: the copies of the sockets may still close them.
        """
        self._is_closed = True
        if self._selector is None:
            if self._listener is not None:
                self._listener.close()
            return
        null = os.open(os.devnull, os.O_RDWR)
        for file in (*(key.fd for key in self._selector.get_map().values()), self._selector.fileno()):
            os.dup2(null, file, inheritable=False)
        os.close(null)

    def _call(self, function: Callable[[], object]) -> None:
        """Let the thread call it soon; without one call it now."""
        if self.num_ranks == 1:
            function()
        elif self._loop is not None:
            with suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(function)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        """From the first link to the last."""
        assert self._listener is not None
        await self._overlay.open(self._listener)
        self._peers.open()
        self.every(self._timing.look, self._look)
        await self._leaves.wait()
        self._overlay.flood("goodbye", None)
        await self._overlay.close(GOODBYE)  # closing the links at once could take it from the others
        self._peers.close()

    def _look(self) -> None:
        """Called again and again, several times in the seconds that anything may take."""
        self._decide()
        now = time.monotonic()
        if now >= self._ping_at:
            self._ping_at = now + self._timing.ping
            self._overlay.ping()
        self._peers.look()
        self._look_at = now + self._timing.look

    def _decide(self) -> None:
        """Decide where it is this rank's turn, unless it could not run for a while: others may have decided since."""
        now, takeover = time.monotonic(), self._timing.takeover
        if self.num_ranks > 1:
            stood_still = now - self._look_at
            self._look_at = max(self._look_at, now)
            if stood_still > STOOD_STILL:
                self._peers.restart_clocks()
            if stood_still > takeover / 2:
                self._decide_at = now + takeover
        turn = min(self._peers.running.index(self.rank), MOST_WAITS)  # 0: the arbiter, which decides at once
        for topic, (proposal, since) in list(self._proposals.items()):
            if now >= max(since + takeover * turn, self._decide_at):
                self._overlay.flood("verdict", {"topic": topic, "verdict": proposal})

    def _on_message(self, message: dict[str, Json]) -> None:
        sender, kind, content = message["from"], message["kind"], message["content"]
        if kind == "proposal":
            if content["topic"] not in self._verdicts:
                self._proposals.setdefault(content["topic"], (content["proposal"], time.monotonic()))
            self._call(self._decide)  # after this round, in which another rank's verdict may still be read
        elif kind == "ask":
            self._on_ask(message)
        elif kind == "reply":
            with self._changed:
                self._replies.get(message["to"][1], {})[sender] = content
                self._changed.notify_all()
        elif kind == "goodbye":
            self._on_state(sender, {"rank": sender, "state": "ended", "reason": "", "seconds": 0.0})
        elif kind == "state":
            self._on_state(sender, content)
        elif kind != "verdict" or self._on_verdict(content):
            self._dispatch(kind, sender, content)

    def _on_ask(self, message: dict[str, Json]) -> None:
        """Answer with a list: of nothing, if this rank has no answer."""
        function, answers = self._functions.get(message["content"]["question"]), []
        if function is not None:
            guarded(lambda: answers.append(function(message["content"]["content"])))
        self._overlay.reply((message["from"], message["number"]), answers)

    def _on_state(self, sender: int, content: Json) -> None:
        if self._peers.on_state(sender, content):
            self._call(self._decide)
            with self._changed:  # questions wait for ranks that run
                self._changed.notify_all()
            self._dispatch("state", sender, content)

    def _on_verdict(self, content: Json) -> bool:
        """Return whether it is the first about its topic, and so counts."""
        topic = content["topic"]
        with self._changed:
            self._proposals.pop(topic, None)
            is_first = topic not in self._verdicts
            self._verdicts.setdefault(topic, content["verdict"])
            self._changed.notify_all()
        return is_first

    def _dispatch(self, kind: str, sender: int, content: Json) -> None:
        for handler in tuple(self._handlers.get(kind, {}).values()):
            guarded(handler, sender, content)


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
os.register_at_fork(after_in_child=_leave_in_child)


def guarded(function: Callable[..., object], *arguments: Any) -> None:
    """Call it. An error is shown, and the loop goes on: others rely on it."""
    try:
        function(*arguments)
    except Exception:
        traceback.print_exc()

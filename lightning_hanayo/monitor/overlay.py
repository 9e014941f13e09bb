"""Links each rank's monitor with some others, and floods messages: each rank forwards each of them once.

rank r is linked with r +- 1, 2, 4, 8 ... (modulo the number of ranks); the higher of two ranks connects

8 ranks:     0 -- 1, 2, 4, 6, 7              at most 2 log2(n) links: for 1,024 ranks 19, and 6 hops at most

hello        {"token": ..., "rank": 3}       the first line on each link, in both directions
message      {"from": 3, "number": 17, "kind": "state", "content": ...}
ping         {}                              each second on each link; nothing else while nothing happens
"""

import errno
import hmac
import json
import os
import selectors
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any

from lightning_hanayo.monitor.processes import Member

LONGEST_HELLO = 512
"""bytes of a line that anybody may send"""
LONGEST_LINE = 1 << 20
"""bytes of a line between ranks"""
MOST_WAITING = 1 << 23
"""limit of a peer's send buffer; above it the peer is disconnected"""


class Connection:
    """One TCP connection between two monitors, which carries lines and never blocks. Belongs to the loop's thread.

    Args:
        file: connected, or being connected.
        loop: waits for it.
        owner: gets lines.
    """

    def __init__(self, file: socket.socket, loop: "Loop", owner: "Overlay") -> None:
        self.rank: int | None = None
        """whose monitor is at the other end, once it has said so"""
        self.opened = self.heard = time.monotonic()
        self._file, self._loop, self._owner = file, loop, owner
        self._incoming, self._outgoing = bytearray(), bytearray()
        file.setblocking(False)
        with suppress(OSError):
            file.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(file, self._on_ready)

    @property
    def is_open(self) -> bool:
        """Whether neither side has closed it."""
        return self._file.fileno() >= 0

    def send(self, line: bytes) -> None:
        """Send a line, soon."""
        if self.is_open:
            self._outgoing += line + b"\n"
            self._write()

    def finish(self) -> None:
        """Send no more; the other side then closes it, once it has read everything."""
        with suppress(OSError):
            self._file.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close it without telling the owner."""
        if self.is_open:
            self._loop.unwatch(self._file)
            self._file.close()

    def _fail(self) -> None:
        if self.is_open:
            self.close()
            self._owner.drop(self)

    def _on_ready(self, events: int) -> None:
        if events & EVENT_WRITE:
            self._write()
        if events & EVENT_READ and self.is_open:
            self._read()

    def _write(self) -> None:
        try:
            sent = self._file.send(self._outgoing) if self._outgoing else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._fail()
            return
        del self._outgoing[:sent]
        if len(self._outgoing) > MOST_WAITING:
            self._fail()
        else:
            # asking while there is nothing to write would wake the loop all the time
            self._loop.watch(self._file, self._on_ready, writes=bool(self._outgoing))

    def _read(self) -> None:
        try:
            data = self._file.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._fail()
            return
        self.heard = time.monotonic()
        self._incoming += data
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = rest
        for line in lines:
            if self.is_open and len(line) > self._longest:
                self._fail()
            elif self.is_open:
                self._owner.on_line(self, bytes(line))
        if self.is_open and len(rest) > self._longest:
            self._fail()

    @property
    def _longest(self) -> int:
        return LONGEST_HELLO if self.rank is None else LONGEST_LINE


MAX_WAIT = 1.0
"""seconds until the loop looks at the time again"""


class Timer:
    """Calls a function again and again, or once."""

    def __init__(self, seconds: float, function: Callable[[], object], *, repeats: bool) -> None:
        self.seconds, self.function, self.repeats = seconds, function, repeats
        self.due = time.monotonic() + seconds


class Loop:
    """A thread that runs functions: when a file is ready, when a time has come, or when another thread wants it.

    All functions but `call`, `start` and `join` are called in its thread.
    """

    def __init__(self) -> None:
        self.on_standstill: Callable[[float], object] = bool
        """called with the seconds for which the loop could do nothing, before anything else: this process was stopped,
        or could not run Python, or a function took so long"""
        self._files = selectors.DefaultSelector()
        self._wanted: deque[Callable[[], object]] = deque()
        self._timers: list[Timer] = []
        self._wake: socket.socket | None = None
        self._woken: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="hanayo-monitor")
        self._runs = True

    def start(self) -> None:
        """Start the thread."""
        wake, woken = socket.socketpair()
        for end in (wake, woken):
            end.setblocking(False)
        wake.send(b".")  # for functions that were wanted before
        self._files.register(woken, selectors.EVENT_READ, lambda _: woken.recv(4096))
        self._wake, self._woken = wake, woken
        self._thread.start()

    def call(self, function: Callable[[], object]) -> None:
        """Let the loop call the function soon. From any thread; returns at once."""
        self._wanted.append(function)
        with suppress(OSError):  # full: it is awake anyway; closed: nobody will call it
            if self._wake is not None:
                self._wake.send(b".")

    def later(self, seconds: float, function: Callable[[], object]) -> None:
        """Call the function once, after this round."""
        self.add(Timer(seconds, function, repeats=False))

    def add(self, timer: Timer) -> None:
        """Begin with the calls of a timer."""
        self._timers.append(timer)

    def cancel(self, timer: Timer) -> None:
        """Call its function no more."""
        if timer in self._timers:
            self._timers.remove(timer)

    def watch(self, file: Any, handler: Callable[[int], object], *, writes: bool = False) -> None:
        """Call the handler with the selector's events when the file can be read, or written if that is wanted."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writes else 0)
        if file in self._files.get_map():
            self._files.modify(file, events, handler)
        else:
            self._files.register(file, events, handler)

    def unwatch(self, file: Any) -> None:
        """Wait for it no more."""
        if file in self._files.get_map():
            self._files.unregister(file)

    @property
    def is_started(self) -> bool:
        """Whether there is a thread, or was one."""
        return self._thread.ident is not None

    def end(self) -> None:
        """End the thread after this round."""
        self._runs = False

    def join(self, seconds: float) -> None:
        """Wait so long at most until the thread has ended; not if it is the caller."""
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def leave_in_child(self) -> None:
        """Close all files in a forked process, which has no thread for them; its parent still waits for them."""
        files = [key.fileobj for key in self._files.get_map().values()]
        self.close_files()
        for file in files:
            if isinstance(file, int):
                os.close(file)
            else:
                file.close()  # type: ignore[attr-defined]

    def close_files(self) -> None:
        """Close the loop's own files."""
        for file in (self._files, self._wake, self._woken):
            if file is not None:
                file.close()

    def _run(self) -> None:
        last = time.monotonic()
        while self._runs:
            due = min((timer.due for timer in self._timers), default=last + MAX_WAIT)
            begun = time.monotonic()
            wait = max(0.0, min(due - begun, MAX_WAIT))
            ready = self._files.select(wait)
            now = time.monotonic()
            guarded(self.on_standstill, begun - last + max(0.0, now - begun - wait))
            last = now
            for key, events in ready:
                current = self._files.get_map().get(key.fd)  # an earlier handler may have closed it
                if current is not None and current.fileobj is key.fileobj:
                    guarded(key.data, events)
            for _ in range(len(self._wanted)):
                guarded(self._wanted.popleft())
            for timer in [timer for timer in self._timers if timer.due <= now]:
                timer.due = now + timer.seconds
                if not timer.repeats:
                    self.cancel(timer)
                guarded(timer.function)
        self.close_files()


def guarded(function: Callable[..., object], *arguments: Any) -> None:
    """Call it. An error is shown, and the loop goes on: others rely on it."""
    try:
        function(*arguments)
    except Exception:
        traceback.print_exc()


Json = Any
"""a value that `json.dumps` takes and `json.loads` gives"""
HELLO_TIME = 5.0
"""seconds that a stranger has to say hello"""
MOST_STRANGERS = 64
"""connections that haven't said hello; beyond them the oldest is closed"""
AGAIN = 0.2
"""seconds between two attempts to connect"""
REMEMBERED, REPEATED = 10_000, 256
"""messages that a rank knows again; those of them that it sends to a rank with which it gets linked"""


def neighbours(rank: int, num_ranks: int) -> tuple[int, ...]:
    """The ranks that a rank is linked with.

    Example:
        >>> neighbours(0, 8)
        (1, 2, 4, 6, 7)
    """
    steps = [1 << power for power in range(num_ranks.bit_length()) if 1 << power < num_ranks]
    return tuple(sorted({(rank + sign * step) % num_ranks for step in steps for sign in (1, -1)} - {rank}))


class Overlay:
    """One rank's links. It belongs to the loop's thread.

    Args:
        rank: this one.
        members: of all ranks.
        token: known to the ranks alone.
        listener: the socket at which others connect; None in a world of one rank, where nothing is opened.
        loop: runs it.
        on_message: called with each message, once; also with this rank's own.
        on_up: called with a rank when the link to it is there.
        on_lost: called with a rank when the link to it has ended.
    """

    def __init__(
        self,
        rank: int,
        members: Sequence[Member],
        token: str,
        listener: socket.socket | None,
        loop: Loop,
        *,
        on_message: Callable[[dict[str, Json]], object],
        on_up: Callable[[int], object],
        on_lost: Callable[[int], object],
    ) -> None:
        self.neighbours = neighbours(rank, len(members))
        self._rank, self._members, self._token = rank, members, token
        self._listener, self._loop = listener, loop
        self._on_message, self._on_up, self._on_lost = on_message, on_up, on_lost
        self._links: dict[int, Connection] = {}
        self._strangers: list[Connection] = []
        self._dialled: dict[int, Connection] = {}
        self._numbers = count()
        self._seen: dict[tuple[int, int], int | None] = {}
        self._repeated: deque[bytes] = deque(maxlen=REPEATED)
        self._gone: set[int] = set()

    def open(self) -> None:
        """Begin to connect."""
        if self._listener is not None:
            self._listener.setblocking(False)
            self._loop.watch(self._listener, self._accept)
        for rank in self.neighbours:
            if rank < self._rank:
                self._connect(rank)

    def heard(self, rank: int) -> float | None:
        """When the rank has sent something over its link, by `time.monotonic`; None without a link."""
        link = self._links.get(rank)
        return None if link is None else link.heard

    def flood(self, kind: str, content: Json) -> tuple[int, int]:
        """Send a message to all ranks, this one too; return its id."""
        message_id = self._rank, next(self._numbers)
        self._pass_on(message_id, {"from": self._rank, "number": message_id[1], "kind": kind, "content": content}, None)
        return message_id

    def reply(self, message_id: tuple[int, int], content: Json) -> None:
        """Send an answer back on the way by which a message has come."""
        if message_id[0] == self._rank:
            self._on_message({"from": content["rank"], "kind": "reply", "to": message_id, "content": content})
            return
        via = self._seen.get(message_id)
        if via is not None and via in self._links:
            self._links[via].send(_encoded({"kind": "reply", "to": message_id, "content": content}))

    def ping(self) -> None:
        """Called each second: tell the neighbours that this rank's loop runs."""
        for link in list(self._links.values()):
            link.send(b"{}")
        late = time.monotonic() - HELLO_TIME
        for stranger in [stranger for stranger in self._strangers if stranger.opened < late]:
            self.drop(stranger)

    def forget(self, rank: int) -> None:
        """The rank has ended: don't connect to it again."""
        self._gone.add(rank)

    def finish(self) -> None:
        """Send no more to anybody."""
        for link in self._links.values():
            link.finish()

    @property
    def is_linked(self) -> bool:
        """Whether a link is left."""
        return bool(self._links)

    def close(self) -> None:
        """Close all connections."""
        self._gone.update(self.neighbours)
        for connection in (*self._links.values(), *self._strangers):
            connection.close()
        self._links.clear()
        self._strangers.clear()
        if self._listener is not None:
            self._loop.unwatch(self._listener)
            self._listener.close()
            self._listener = None

    def on_line(self, connection: Connection, line: bytes) -> None:
        """Called with each line: the first is a hello; garbage ends the connection."""
        try:
            decoded = json.loads(line)
        except (ValueError, RecursionError):
            decoded = None
        message = decoded if isinstance(decoded, dict) else {}
        if connection.rank is None:
            self._greet(connection, message)
        elif message.get("kind") == "reply":
            self.reply(tuple(message["to"]), message["content"])
        elif message:
            self._pass_on((message["from"], message["number"]), message, connection.rank)

    def _pass_on(self, message_id: tuple[int, int], message: dict[str, Json], via: int | None) -> None:
        if message_id in self._seen:
            return
        self._seen[message_id] = via
        if len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]
        line = _encoded(message)
        self._repeated.append(line)
        for rank, link in list(self._links.items()):
            if rank != via:
                link.send(line)
        self._on_message(message)

    def _accept(self, _: int) -> None:
        if self._listener is None:
            return
        try:
            file, _address = self._listener.accept()
        except OSError:  # the other side has given up
            return
        self._add_stranger(file)

    def _add_stranger(self, file: socket.socket) -> Connection:
        """Both sides say hello; until the other one does, it is a stranger."""
        if len(self._strangers) >= MOST_STRANGERS:
            self.drop(self._strangers[0])
        connection = Connection(file, self._loop, self)
        self._strangers.append(connection)
        connection.send(_encoded({"token": self._token, "rank": self._rank}))
        return connection

    def _connect(self, rank: int) -> None:
        if rank in self._gone or rank in self._links:
            return
        if rank not in self._dialled or not self._dialled[rank].is_open:
            member = self._members[rank]
            file = socket.socket(socket.AF_INET6 if ":" in member.address else socket.AF_INET, socket.SOCK_STREAM)
            file.setblocking(False)
            if file.connect_ex((member.address, member.port)) in (0, errno.EINPROGRESS):
                self._dialled[rank] = self._add_stranger(file)
            else:
                file.close()
        self._loop.later(AGAIN, lambda: self._connect(rank))

    def _greet(self, connection: Connection, hello: dict[str, Json]) -> None:
        rank, token = hello.get("rank"), str(hello.get("token"))
        if rank not in self.neighbours or not hmac.compare_digest(token.encode(), self._token.encode()):
            self.drop(connection)
            return
        if (older := self._links.pop(rank, None)) is not None:  # its end may not have been seen yet
            older.close()
        self._strangers.remove(connection)
        connection.rank, self._links[rank] = rank, connection
        for line in list(self._repeated):  # what it may have missed; it knows again what it has
            connection.send(line)
        self._on_up(rank)

    def drop(self, connection: Connection) -> None:
        """Close a connection; called, too, when the other side has closed it."""
        connection.close()
        if connection in self._strangers:
            self._strangers.remove(connection)
        rank = connection.rank
        if rank is None or self._links.get(rank) is not connection:
            return
        del self._links[rank]
        if rank < self._rank:
            self._loop.later(AGAIN, lambda: self._connect(rank))
        self._on_lost(rank)


def _encoded(message: dict[str, Json]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()

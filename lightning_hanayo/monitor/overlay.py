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
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from lightning_hanayo.monitor.connection import Connection
from lightning_hanayo.monitor.loop import Loop
from lightning_hanayo.monitor.member import Member

Json = Any
"""what `json.dumps` takes and `json.loads` gives"""
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
            self._drop(stranger)

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
        message = _decoded(line)
        if connection.rank is None:
            self._greet(connection, message)
        elif message.get("kind") == "reply":
            self.reply(tuple(message["to"]), message["content"])
        elif message:
            self._pass_on((message["from"], message["number"]), message, connection.rank)

    def on_closed(self, connection: Connection) -> None:
        """Called when the other side has closed it."""
        self._drop(connection)

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
            self._drop(self._strangers[0])
        connection = Connection(file, self._loop, self)
        self._strangers.append(connection)
        connection.send(_encoded({"token": self._token, "rank": self._rank}))
        return connection

    def _connect(self, rank: int) -> None:
        if rank in self._gone or rank in self._links:
            return
        if rank not in self._dialled or not self._dialled[rank].is_open:
            self._dial(rank)
        self._loop.later(AGAIN, lambda: self._connect(rank))

    def _dial(self, rank: int) -> None:
        member = self._members[rank]
        family = socket.AF_INET6 if ":" in member.address else socket.AF_INET
        file = socket.socket(family, socket.SOCK_STREAM)
        file.setblocking(False)
        if file.connect_ex((member.address, member.port)) in (0, errno.EINPROGRESS):
            self._dialled[rank] = self._add_stranger(file)
        else:
            file.close()

    def _greet(self, connection: Connection, hello: dict[str, Json]) -> None:
        rank, token = hello.get("rank"), str(hello.get("token"))
        if rank not in self.neighbours or not hmac.compare_digest(token.encode(), self._token.encode()):
            self._drop(connection)
            return
        if (older := self._links.pop(rank, None)) is not None:
            older.close()
        self._strangers.remove(connection)
        connection.rank, self._links[rank] = rank, connection
        for line in list(self._repeated):
            connection.send(line)
        self._on_up(rank)

    def _drop(self, connection: Connection) -> None:
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


def _decoded(line: bytes) -> dict[str, Json]:
    """{} for a line that is none of ours."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _encoded(message: dict[str, Json]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()

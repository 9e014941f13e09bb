"""Links each rank's monitor with some others, and floods messages: each rank forwards each of them once.

rank r is linked with r +- 1, 2, 4, 8 ... (modulo the number of ranks); the higher of two ranks connects

8 ranks:     0 -- 1, 2, 4, 6, 7              at most 2 log2(n) links: for 1,024 ranks 19, and 6 hops at most

hello        {"token": ..., "rank": 3}       the first line on each link, in both directions
message      {"from": 3, "number": 17, "kind": "state", "content": ...}
ping         {}                              each second on each link; nothing else while nothing happens
"""

import asyncio
import hmac
import json
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from lightning_hanayo.monitor.processes import Member

Json = Any
"""a value that `json.dumps` takes and `json.loads` gives"""
LONGEST_LINE = 1 << 20
"""bytes"""
MOST_WAITING = 1 << 23
"""limit of a peer's send buffer; above it the peer is disconnected"""
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


class Link:
    """One TCP connection between two monitors, which carries lines. A stranger's, until it has said hello."""

    task: "asyncio.Task[None]"
    """reads its lines until it ends"""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self.transport = transport
        self.rank: int | None = None
        """whose monitor is at the other end, once it has said so"""
        self.heard = time.monotonic()
        self._is_finished = False

    def send(self, line: bytes) -> None:
        """Send a line, soon."""
        if not self._is_finished and not self.transport.is_closing():
            self.transport.write(line + b"\n")
            if self.transport.get_write_buffer_size() > MOST_WAITING:
                self.transport.abort()

    def finish(self) -> None:
        """Send no more; the other side then closes it, once it has read everything."""
        self._is_finished = True
        with suppress(OSError):
            self.transport.write_eof()


class Overlay:
    """One rank's links. All but `numbers` belongs to the thread of the event loop.

    Args:
        rank: this one.
        members: of all ranks.
        token: known to the ranks alone.
        on_message: called with each message, once; also with this rank's own.
    """

    def __init__(
        self, rank: int, members: Sequence[Member], token: str, on_message: Callable[[dict[str, Json]], object]
    ) -> None:
        self.neighbours = neighbours(rank, len(members))
        self.numbers = count()
        """of this rank's messages"""
        self.lost: dict[int, float] = {}
        """when the link to a rank has ended, by `time.monotonic`, unless there is another one"""
        self._rank, self._members, self._on_message = rank, members, on_message
        self._token = token
        self._links: dict[int, Link] = {}
        self._open: list[Link] = []
        """all connections, with those of strangers"""
        self._seen: dict[tuple[int, int], int | None] = {}
        self._repeated: deque[bytes] = deque(maxlen=REPEATED)
        self._dials: dict[int, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    async def open(self, listener: socket.socket) -> None:
        """Let others connect at the listening socket, and begin to connect."""
        self._server = await asyncio.start_server(self._begin, sock=listener, limit=LONGEST_LINE)
        self._dials = {rank: asyncio.create_task(self._dial(rank)) for rank in self.neighbours if rank < self._rank}

    async def close(self, seconds: float) -> None:
        """Send no more. Close all connections once the others have read everything, but after the seconds at most."""
        for dial in self._dials.values():
            dial.cancel()
        links = list(self._links.values())
        for link in links:
            link.finish()
        if links:
            await asyncio.wait([link.task for link in links], timeout=seconds)
        others = {asyncio.current_task(), *self._dials.values()}
        while accepting := asyncio.all_tasks() - others - {link.task for link in self._open}:
            await asyncio.wait(accepting)  # a server that closes before them leaves their sockets open
        if self._server is not None:
            self._server.close()
        for link in self._open:
            link.transport.abort()

    def heard(self, rank: int) -> float | None:
        """When the rank has sent something over its link, by `time.monotonic`; None without a link."""
        link = self._links.get(rank)
        return None if link is None else link.heard

    def flood(self, kind: str, content: Json, number: int | None = None) -> None:
        """Send a message to all ranks, this one too; its number is drawn from `numbers`."""
        number = next(self.numbers) if number is None else number
        self._pass_on({"from": self._rank, "number": number, "kind": kind, "content": content}, None)

    def reply(self, message_id: tuple[int, int], content: Json) -> None:
        """Send an answer back on the way by which a message has come."""
        self._send_back({"kind": "reply", "from": self._rank, "to": message_id, "content": content})

    def ping(self) -> None:
        """Called each second: tell the neighbours that this rank's loop runs."""
        for link in list(self._links.values()):
            link.send(b"{}")

    def forget(self, rank: int) -> None:
        """The rank has ended: don't connect to it again."""
        if rank in self._dials:
            self._dials[rank].cancel()

    def _pass_on(self, message: dict[str, Json], via: int | None) -> None:
        message_id = message["from"], message["number"]
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

    def _send_back(self, reply: dict[str, Json]) -> None:
        asker, number = reply["to"]
        via = self._seen.get((asker, number))
        if asker == self._rank:
            self._on_message(reply)
        elif via is not None and via in self._links:
            self._links[via].send(_encoded(reply))

    async def _dial(self, rank: int) -> None:
        """Keep up the link with a lower rank."""
        member = self._members[rank]
        while True:
            with suppress(OSError):
                streams = await asyncio.open_connection(member.address, member.port, limit=LONGEST_LINE)
                await asyncio.wait([self._begin(*streams)])
            await asyncio.sleep(AGAIN)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> "asyncio.Task[None]":
        """Called with each new connection: both sides say hello."""
        link = Link(writer.transport)
        strangers = [one for one in self._open if one.rank is None and not one.transport.is_closing()]
        if len(strangers) >= MOST_STRANGERS:
            strangers[0].transport.abort()
        link.send(_encoded({"token": self._token, "rank": self._rank}))
        link.task = asyncio.create_task(self._read(link, reader))
        self._open.append(link)
        return link.task

    async def _read(self, link: Link, reader: asyncio.StreamReader) -> None:
        """Take lines until the connection ends: the first is a hello. Garbage, or a line that is too long, ends it."""
        with suppress(OSError, ValueError, RecursionError):
            async for line in reader:
                message = json.loads(line)
                if link.transport.is_closing() or link.rank is None and not self._is_greeted(link, message):
                    break
                link.heard = time.monotonic()
                if message.get("kind") == "reply":
                    self._send_back(message)
                elif "kind" in message:
                    self._pass_on(message, link.rank)
        link.transport.close()
        self._open.remove(link)
        if link.rank is not None and self._links.get(link.rank) is link:
            del self._links[link.rank]
            self.lost[link.rank] = time.monotonic()

    def _is_greeted(self, link: Link, hello: Json) -> bool:
        """Whether a rank of this world, which is a neighbour, has said hello."""
        if not isinstance(hello, dict) or hello.get("rank") not in self.neighbours:
            return False
        if not hmac.compare_digest(str(hello.get("token")).encode(), self._token.encode()):
            return False
        rank = hello["rank"]
        if (older := self._links.get(rank)) is not None:  # its end may not have been seen yet
            older.transport.abort()
        link.rank, self._links[rank] = rank, link
        self.lost.pop(rank, None)
        for line in list(self._repeated):  # what it may have missed; it knows again what it has
            link.send(line)
        return True


def _encoded(message: dict[str, Json]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()

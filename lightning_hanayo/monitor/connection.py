"""One TCP connection between two monitors, which carries lines and never blocks."""

import socket
import time
from contextlib import suppress
from selectors import EVENT_READ, EVENT_WRITE
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from lightning_hanayo.monitor.loop import Loop

LONGEST_HELLO = 512
"""bytes of a line that anybody may send"""
LONGEST_LINE = 1 << 20
"""bytes of a line between ranks"""
MOST_WAITING = 1 << 23
"""bytes that wait for a rank that doesn't read; then its connection is closed"""


class Owner(Protocol):
    """What hears from a connection."""

    def on_line(self, connection: "Connection", line: bytes) -> None:
        """Called with each line."""

    def on_closed(self, connection: "Connection") -> None:
        """Called once, when it is closed by the other side, or because of what that has sent."""


class Connection:
    """Belongs to the loop's thread.

    Args:
        file: connected, or being connected.
        loop: waits for it.
        owner: gets lines.
    """

    def __init__(self, file: socket.socket, loop: "Loop", owner: Owner) -> None:
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
            self._owner.on_closed(self)

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
            if self.is_open:
                self._check(line)
        if self.is_open and len(rest) > self._longest:
            self._fail()

    def _check(self, line: bytearray) -> None:
        if len(line) > self._longest:
            self._fail()
        else:
            self._owner.on_line(self, bytes(line))

    @property
    def _longest(self) -> int:
        return LONGEST_HELLO if self.rank is None else LONGEST_LINE

"""Drives headless Chromium over a pipe (DevTools protocol): opens pages, moves the mouse, reads what is shown."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = "needs Chromium, such as the distribution's package `chromium`"
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--remote-debugging-pipe",
)  # fmt: skip
_EXEC = """
import os, sys
from fcntl import F_DUPFD, fcntl
pipes = [fcntl(int(number), F_DUPFD, 10) for number in sys.argv[1:3]]
for pipe, number in zip(pipes, (3, 4)):  # where the protocol has them
    os.dup2(pipe, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find() -> str | None:
    """The path of the browser; None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a browser. Coordinates are in CSS pixels, from the top left of the window."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._send("Page.enable")

    def open(self, path: Path | str) -> None:
        """Load a page, and wait until its scripts have run."""
        url = path.as_uri() if isinstance(path, Path) else path
        self._send("Page.navigate", url=url)
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size of the window."""
        self._send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression; of a promise, its result."""
        found = self._send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def point_at(self, selector: str) -> None:
        """Move the mouse to the middle of the first element that matches."""
        self._mouse("mouseMoved", selector)

    def click(self, selector: str) -> None:
        """Click on the middle of the first element that matches."""
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self._mouse(kind, selector)

    def move(self, x: float, y: float) -> None:
        """Move the mouse to a place in the window."""
        self._send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _mouse(self, kind: str, selector: str) -> None:
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = self.value(f"(b => [b.x + b.width / 2, b.y + b.height / 2])({box})")
        self._send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def _send(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            more = os.read(self._read, 1 << 16)
            assert more, "the browser has ended"
            self._buffer += more
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a browser that keeps its files in this folder, and ends with the block."""
    path = find()
    assert path is not None, MISSING
    (from_us, to_it), (from_it, to_us) = os.pipe(), os.pipe()
    command = [path, *_OPTIONS, f"--user-data-dir={folder}", "about:blank"]
    process = subprocess.Popen(
        [sys.executable, "-c", _EXEC, str(from_us), str(to_us), *command],
        pass_fds=(from_us, to_us),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(from_us)
    os.close(to_us)
    try:
        yield Page(to_it, from_it)
    finally:
        os.close(to_it)  # it ends when nobody speaks to it any more
        os.close(from_it)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()

"""One answer to each question, the same on all ranks: the proposal that the arbiter gets first.

rank 3    propose "failure": A   --+
                                   +-->  rank 0, the arbiter, gets A first:  verdict A, flooded to all
rank 5    propose "failure": B   --+

If the arbiter doesn't answer within a second, the next rank that runs decides, and so on, up to `MOST_WAITS` of them.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_WAITS = 3
"""after so many ranks that don't answer, each rank decides for itself"""


@dataclass
class _Open:
    proposal: Any
    since: float


class Verdicts:
    """One rank's view. It belongs to the loop's thread, but for `wait`, `get` and `closed`.

    Args:
        rank: this one.
        running: the ranks that run, in order.
        tell: floods a message.
        takeover: seconds that a rank has to decide.
    """

    def __init__(
        self,
        rank: int,
        running: Callable[[], list[int]],
        tell: Callable[[str, Any], object],
        takeover: float,
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
        """Decide what is this rank's turn. Called when proposals have come, and again while some are open."""
        now = time.monotonic()
        for topic, one in list(self._open.items()):
            if now >= max(one.since + self._takeover * self._turn, self._not_before):
                self._tell("verdict", {"topic": topic, "verdict": one.proposal})

    def wait_for_others(self) -> None:
        """This rank could not decide for a while: others have, maybe. It waits until it has heard of that."""
        self._not_before = time.monotonic() + self._takeover

    def close(self) -> None:
        """Let nobody wait any longer."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def _turn(self) -> int:
        running = self._running()
        return min(running.index(self._rank), MOST_WAITS)

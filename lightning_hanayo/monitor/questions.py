"""A rank asks all ranks something, and gets the answers of those that answer in time.

rank 2    ask "position"   --flooded-->   each rank answers in its monitor's thread
          {0: 12, 1: 12, 2: 13}   <--     on the way by which it heard the question
"""

import threading
from collections.abc import Callable
from typing import Any

from lightning_hanayo.monitor.loop import guarded
from lightning_hanayo.monitor.overlay import Overlay


class Pending:
    """A question of this rank that waits for answers."""

    def __init__(self) -> None:
        self.replied: set[int] = set()
        self.answers: dict[int, Any] = {}
        self.is_complete = threading.Event()


class Questions:
    """One rank's view. It belongs to the loop's thread.

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

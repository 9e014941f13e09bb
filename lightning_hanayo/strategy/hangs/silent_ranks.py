"""Where ranks are that hold Python's lock (GIL), and so don't answer: a rank on their host reads their stacks."""

import time
from collections.abc import Collection
from typing import Any

from lightning_hanayo.monitor.hangs import tracebacks
from lightning_hanayo.monitor.monitor import Monitor

_QUESTION = "stacks of silent ranks"
_WRITING = 0.2
"""seconds for a process to write its stack"""


class SilentRanks:
    """One rank's side of it: lets others read its stack, and reads theirs when it is asked to."""

    def __init__(self, monitor: Monitor) -> None:
        tracebacks.let_others_read()
        self._monitor = monitor
        self.stop = monitor.answer(_QUESTION, self._answer)

    def explain(self, ranks: Collection[int], answering: Collection[int]) -> dict[int, str]:
        """Why these ranks don't answer, and where they are. Not from the monitor's thread."""
        hosts = {member.rank: member.host for member in self._monitor.members}
        readers = {rank: next((one for one in answering if hosts[one] == hosts[rank]), None) for rank in ranks}
        pairs = [[rank, reader] for rank, reader in readers.items() if reader is not None]
        places: dict[str, str] = {}
        if pairs:
            self._monitor.ask(_QUESTION, {"pairs": pairs, "reads": False})
            time.sleep(_WRITING)
            for answer in self._monitor.ask(_QUESTION, {"pairs": pairs, "reads": True}).values():
                places |= answer or {}
        return {rank: _explained(places.get(str(rank))) for rank in ranks}

    def _answer(self, content: Any) -> dict[str, str]:
        """In the monitor's thread: let the ranks that are this one's to read write their stacks, or read them."""
        pids = {member.rank: member.pid for member in self._monitor.members}
        own = [rank for rank, reader in content["pairs"] if reader == self._monitor.member.rank]
        if not content["reads"]:
            for rank in own:
                tracebacks.request_stack(pids[rank])
            return {}
        lines = {str(rank): tracebacks.read_stack(pids[rank]) for rank in own}
        return {rank: f"{line.function}, {line.path}:{line.line}" for rank, line in lines.items() if line is not None}


def _explained(place: str | None) -> str:
    if place is None:
        return "does not answer: it holds Python's lock (GIL), or its host is busy or can't be reached"
    return f"does not answer, since it holds Python's lock (GIL): it is in {place}"

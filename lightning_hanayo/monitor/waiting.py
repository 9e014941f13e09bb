"""States the wait of each thread of this process; reports of hangs read the statements from another thread.

    with Waiting("the sum of gradients", ranks):     written where the wait begins
        work.wait()
    stated([thread])                                 read by the monitor's thread while the wait lasts

Threads belong to the process, so the statements do, too. A transfer's statement holds its work while it waits.
"""

from collections.abc import Iterable
from threading import get_ident

_statements: dict[int, "Waiting"] = {}
"""by the identity of a thread: the innermost wait"""


class Waiting:
    """Inside it, this thread waits for other ranks.

    Args:
        what: as in "the sum of gradients over the data ranks"; or a value whose text is made for a report only. None:
            the wait around this one says it.
        whom: the global ranks of a collective, in the same order on all of them; or a value that names the other rank.
            None: a wait inside this one says it.
    """

    __slots__ = ("outer", "what", "whom")

    def __init__(self, what: object, whom: object) -> None:
        self.what = what
        self.whom = whom

    def __enter__(self) -> None:
        thread = get_ident()
        self.outer = _statements.get(thread)
        _statements[thread] = self

    def __exit__(self, *_: object) -> None:
        if self.outer is None:
            del _statements[get_ident()]
        else:
            _statements[get_ident()] = self.outer


def stated(threads: Iterable[int] | None = None) -> Waiting | None:
    """The wait of the first of these threads that waits; of any thread if None."""
    statements = dict(_statements)
    found = (statements.get(thread) for thread in (statements if threads is None else threads))
    return next((one for one in found if one is not None), None)

"""Values that a recomputed module makes once: its second run, in the backward, takes those of the first one.

F    once(choose)     makes a value
B    once(choose)     returns it again, as does the n-th call for the n-th value
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_now = threading.local()


class MadeOnce:
    """The values of one call of a recomputed module, in the order in which its first run made them."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._next = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Each run of the call is in this context."""
        outer, _now.call, self._next = getattr(_now, "call", None), self, 0
        try:
            yield
        finally:
            _now.call = outer

    def value(self, make: Callable[[], T]) -> T:
        """The next value."""
        if self._next == len(self._values):
            self._values.append(make())
        self._next += 1
        value: T = self._values[self._next - 1]
        return value


def once(make: Callable[[], T]) -> T:
    """The result of `make`, or of the same call in the first run of a module that is recomputed now."""
    call: MadeOnce | None = getattr(_now, "call", None)
    return make() if call is None else call.value(make)

"""Sets attributes on the user's objects for the time of a run, and restores them afterwards.

module    on_train_epoch_end: f (the user's)
set       on_train_epoch_end: ours, which calls f
restore   on_train_epoch_end: f
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


class TemporaryAttributes:
    """Remembers what each instance held before, and restores it in reverse order.

    It bypasses `__setattr__` of the instances, so that a module never takes a value for a parameter or a child.
    """

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance, including its `__class__`."""
        self._set.append((owner, name, value, _instance_value(owner, name)))
        object.__setattr__(owner, name, value)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside it, the instances have what they had before: for copies of them."""
        current = [(owner, name, new) for owner, name, new, _ in self._set if _instance_value(owner, name) is new]
        self.restore()
        try:
            yield
        finally:
            for owner, name, value in current:
                self.set(owner, name, value)

    def restore(self) -> None:
        """Restore everything that still has the value set here: what the user has changed since then stays."""
        while self._set:
            owner, name, value, before = self._set.pop()
            if _instance_value(owner, name) is not value:
                continue
            if before is _MISSING:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, before)


class Substitute:
    """Takes the place of a method on an instance. Copies of the instance have the method itself again.

    `call` gets the method, and the arguments.
    """

    def __init__(self, method: Callable[..., Any], call: Callable[..., Any]) -> None:
        self._method, self._call = method, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what stands for the method."""
        return self._call(self._method, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self._method,)


def _itself(method: Any) -> Any:
    return method


def _instance_value(owner: Any, name: str) -> Any:
    """What the instance itself holds, not its class; the value of a property."""
    if name == "__class__" or isinstance(getattr(type(owner), name, None), property):
        return getattr(owner, name)
    return vars(owner).get(name, _MISSING)

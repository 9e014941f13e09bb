"""The changes: attributes that the strategy sets on the user's objects for the time of a run, and takes back.

module    on_train_epoch_end: f (the user's)
set       on_train_epoch_end: ours, which calls f
undo      on_train_epoch_end: f
"""

from typing import Any

_MISSING = object()


class TemporaryAttributes:
    """Remembers what each instance held before, and restores it in reverse order.

    Instances are changed past their own `__setattr__`, so a module never takes a value for a parameter or a child.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance, its `__class__` included."""
        self._made.append((owner, name, value, _held(owner, name)))
        object.__setattr__(owner, name, value)

    def undo(self) -> None:
        """Restore everything that is still as it was set: what the user has changed since then stays."""
        while self._made:
            owner, name, value, before = self._made.pop()
            if _held(owner, name) is not value:
                continue
            if before is _MISSING:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, before)


def _held(owner: Any, name: str) -> Any:
    """What the instance itself holds, and not its class; of a property, its value."""
    if name == "__class__" or isinstance(getattr(type(owner), name, None), property):
        return getattr(owner, name)
    return vars(owner).get(name, _MISSING)

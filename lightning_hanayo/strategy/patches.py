"""Patches for the time of a run, restored afterwards: attributes of instances, and functions of libraries.

module    on_train_epoch_end: f (the user's)          clip_grad_norm_    its own code
set       on_train_epoch_end: ours, which calls f     inside             code that calls ours
restore   on_train_epoch_end: f                       after              its own code

Users import functions by name, so replacing them in their modules would come too late. It is the code
object of the function itself, under its decorators, that is replaced.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType
from typing import Any, Generic, Self, TypeVar

_Run = TypeVar("_Run")

_MISSING = object()


class TemporaryAttributes:
    """Remembers the attributes that instances held before, and restores them in reverse order.

    It bypasses `__setattr__` of the instances, so that a module never takes a value for a parameter or a child.
    """

    def __init__(self) -> None:
        self._set: list[tuple[Any, str, Any, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an instance, including its `__class__`."""
        self._set.append((owner, name, value, _instance_value(owner, name)))
        object.__setattr__(owner, name, value)

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Let `call` take the place of a method of an instance; it gets the method, and the arguments.

        Copies of the instance have the method itself again.
        """
        self.set(owner, name, Substitute(getattr(owner, name), call))

    def before(self, owner: Any, name: str, call: Callable[[], object]) -> None:
        """Let `call` run before each call of a method of an instance."""

        def run(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            call()
            return method(*args, **kwargs)

        self.wrap(owner, name, run)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside it, the instances have their former attributes: for copies of them."""
        current = [(owner, name, new) for owner, name, new, _ in self._set if _instance_value(owner, name) is new]
        self.restore()
        try:
            yield
        finally:
            for owner, name, value in current:
                self.set(owner, name, value)

    def restore(self) -> None:
        """Restore everything that still has the value set here: later changes of the user stay."""
        while self._set:
            owner, name, value, before = self._set.pop()
            if _instance_value(owner, name) is not value:
                continue
            if before is _MISSING:
                object.__delattr__(owner, name)
            else:
                object.__setattr__(owner, name, before)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


class PatchedFunction:
    """Inside it, a function calls another one. One of each name is patched at a time.

    Args:
        function: a plain function, maybe under decorators, without a closure.
        instead: the function that is called, with `original` and the arguments.
        names: globals that the original finds in place of its module's.
    """

    def __init__(
        self, function: Callable[..., Any], instead: Callable[..., Any], names: Mapping[str, Any] | None = None
    ) -> None:
        plain = inspect.unwrap(function)
        assert isinstance(plain, FunctionType)
        self._function, self._code, self.instead = plain, plain.__code__, instead
        scope = plain.__globals__ | dict(names) if names is not None else plain.__globals__
        self.original = FunctionType(plain.__code__, scope, plain.__name__, plain.__defaults__)
        """runs as the function always did"""
        self.original.__kwdefaults__ = plain.__kwdefaults__

    @staticmethod
    def is_possible(function: Callable[..., Any]) -> bool:
        """Whether it is a plain function without a closure."""
        plain = inspect.unwrap(function)
        return isinstance(plain, FunctionType) and not plain.__code__.co_freevars

    def __enter__(self) -> None:
        _patched[self._function.__name__] = self
        self._function.__code__ = _replacement.__code__.replace(co_name=self._function.__name__)

    def __exit__(self, *_: object) -> None:
        self._function.__code__ = self._code
        _patched.pop(self._function.__name__, None)


class PatchedInRuns(Generic[_Run]):
    """Functions that are patched as long as there are runs that need it.

    Args:
        make: returns the functions; called when the first run begins.
    """

    def __init__(self, make: Callable[[], Mapping[str, PatchedFunction]]) -> None:
        self._make = make
        self._patches = ExitStack()
        self.running: list[_Run] = []
        """the runs, the last one last"""
        self.functions: Mapping[str, PatchedFunction] = {}
        """by name, while they are patched"""

    def start(self, run: _Run) -> None:
        """A run begins."""
        if not self.running:
            self.functions = self._make()
            for patch in self.functions.values():
                self._patches.enter_context(patch)
        self.running.append(run)

    def stop(self, run: _Run) -> None:
        """A run has ended. After the last one the functions are as they were. A second call does nothing."""
        if run in self.running:
            self.running.remove(run)
        if not self.running:
            self._patches.close()


_patched: dict[str, PatchedFunction] = {}
"""by the function's name"""


def _replacement(*args: Any, **kwargs: Any) -> Any:
    """Runs with the globals of the function whose code it replaces: so it has its own imports."""
    import sys

    from lightning_hanayo.strategy.patches import _patched

    patch = _patched[sys._getframe().f_code.co_name]
    return patch.instead(patch.original, *args, **kwargs)


class Substitute:
    """Takes the place of a method on an instance. Copies of the instance have the method itself again.

    `call` gets the method, and the arguments.
    """

    def __init__(self, method: Callable[..., Any], call: Callable[..., Any], name: str | None = None) -> None:
        self.__wrapped__, self._call = method, call  # Lightning looks there whether a hook is overridden
        self.__name__ = name or getattr(method, "__name__", type(method).__name__)  # a partial has none

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function that stands for the method."""
        return self._call(self.__wrapped__, *args, **kwargs)

    def __reduce__(self) -> Any:
        return _itself, (self.__wrapped__,)


def _itself(value: Any) -> Any:
    """The argument. For `__reduce__`: a copy is the wrapped function."""
    return value


def _instance_value(owner: Any, name: str) -> Any:
    """The value in the instance itself, not in its class; the value of a property."""
    if name == "__class__" or isinstance(getattr(type(owner), name, None), property):
        return getattr(owner, name)
    return vars(owner).get(name, _MISSING)

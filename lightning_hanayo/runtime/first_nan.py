"""Finds the operation that makes the first NaN while a block runs, with `Trainer(detect_anomaly=True)`.

torch's own anomaly mode looks at backwards alone: a NaN that a forward makes shows in a backward on another rank.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override


class FirstNaN(TorchDispatchMode):
    """While it is open, looks at each operation: `found` is the first that made a NaN of values without one.

    `user_line` returns the line of the user's that is running.
    """

    def __init__(self, user_line: Callable[[], str]) -> None:
        super().__init__()
        self._user_line = user_line
        self.found = ""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        call: Callable[..., Any] = func
        if self.found or "empty" in str(func):  # memory that nothing was written to may look like a NaN
            return call(*args, **(kwargs or {}))
        had_nan = _has_nan((args, kwargs))  # before an operation in place
        made = call(*args, **(kwargs or {}))
        if not had_nan and _has_nan(made):
            self.found = f"{func} in {self._user_line()}"
        return made


def _has_nan(tree: Any) -> bool:
    return any(bool(tensor.isnan().any()) for tensor in _floating(tree))


def _floating(tree: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.is_meta:
            yield leaf

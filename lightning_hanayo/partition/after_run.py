"""Parameters of which this rank holds a part or nothing, after a run: sizes can be read, any other use is an error.

    a run has ended           model.state_dict(), model(x), p.norm()     refused, by the parameter's name
                              p.shape, p.numel(), p.requires_grad        as of the whole parameter
    the next run begins       `release` gives the parameters their own class back

A copy of such a parameter is one as well, also a pickled one: a Trainer may be copied with its module. Not so a file
that `torch.save` writes: it would hold parts, and is refused.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.partial_values import (
    METADATA,
    PartialParameter,
    compute_on_parts,
    is_saving,
    name_of,
    own_shape,
    plain_alias,
)
from lightning_hanayo.partition.missing_values import GuardedPlaceholder, compute_without_values
from lightning_hanayo.partition.ownership import Placeholder

WAY_OUT = (
    "Call model = trainer.strategy.gather_model() on all ranks: it returns a whole, ordinary copy on rank 0, and None "
    "elsewhere. trainer.save_checkpoint(path), too, writes whole values."
)


class PlaceholderAfterRun(GuardedPlaceholder):
    """A placeholder between two runs."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Read what needs no values.

        Raises:
            UnsupportedError: `func` does.
        """
        if (name := name_of(func, args, kwargs)) not in METADATA:
            raise UnsupportedError(_message(name, args, kwargs))
        return compute_without_values(func, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as it is."""
        return _pickled(self)


class PartAfterRun(PartialParameter):
    """A parameter of which this rank holds a part, between two runs."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """As for `PlaceholderAfterRun`."""
        if (name := name_of(func, args, kwargs)) not in METADATA:
            raise UnsupportedError(_message(name, args, kwargs))
        return compute_on_parts(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartAfterRun":
        """A copy is a part, too."""
        memo[id(self)] = copied = _restore(type(self), plain_alias(self).clone(), self.requires_grad, vars(self))
        return copied  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle it as it is."""
        return _pickled(self)


def guard(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse user code that computes with these parameters, which a `ParameterGuard` has watched in a run."""
    for parameter in parameters:
        vars(parameter)["_own_class"] = type(parameter)
        parameter.__class__ = PlaceholderAfterRun if isinstance(parameter, Placeholder) else PartAfterRun


def release(module: nn.Module) -> list[nn.Parameter]:
    """Give the module's parameters, or a copy's, their own classes back; return those that were guarded."""
    guarded: list[nn.Parameter] = [p for p in module.parameters() if isinstance(p, PlaceholderAfterRun | PartAfterRun)]
    for parameter in guarded:
        parameter.__class__ = vars(parameter).pop("_own_class")
    return guarded


@contextmanager
def released(module: nn.Module) -> Iterator[None]:
    """Inside it, code that knows of parts and placeholders finds plain ones."""
    guarded = release(module)
    try:
        yield
    finally:
        guard(guarded)


def _pickled(parameter: Any) -> Any:
    if is_saving():
        raise UnsupportedError(_message("torch.save", (parameter,), None))
    return _restore, (type(parameter), plain_alias(parameter), parameter.requires_grad, vars(parameter))


def _restore(kind: type[nn.Parameter], data: Tensor, requires_grad: bool, attributes: dict[str, Any]) -> Any:
    parameter = kind(data, requires_grad)
    vars(parameter).update(attributes)
    return parameter


def _message(name: str, args: Any, kwargs: Any) -> str:
    leaves = tree_leaves((args, kwargs))
    parameter = next(leaf for leaf in leaves if isinstance(leaf, PlaceholderAfterRun | PartAfterRun))
    if isinstance(parameter, PlaceholderAfterRun):
        where = f"{parameter._owner.name} is on pipeline rank {parameter._owner.rank}"
    else:
        part: Any = parameter._part
        where = f"{part.name}: this rank holds a part of shape {own_shape(parameter)} of the whole {part.shape}"
    return f"{where}, and the run has ended ({name}). {WAY_OUT}"

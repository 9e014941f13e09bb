"""Notices calls of torch's functions that mix the samples of a micro-batch, as mixup does: inputs have no graph.

x.roll(1, 0), x.flip(0)       along the dimension of the samples
torch.randperm(len(x))        as many numbers as there are samples
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

_PLACES: tuple[tuple[Any, str], ...] = (
    (torch, "randperm"), (torch, "roll"), (torch, "flip"), (Tensor, "roll"), (Tensor, "flip"),
)  # fmt: skip


@contextmanager
def noting_mixed_samples(sizes: Collection[int], batch_dim: int, found: dict[str, None]) -> Iterator[None]:
    """While open, add to `found` the calls that mix samples of micro-batches of these sizes, in words."""
    originals = [(place, name, vars(place).get(name), getattr(place, name)) for place, name in _PLACES]
    for place, name, _, function in originals:
        setattr(place, name, _noting(function, sizes, batch_dim, found))
    try:
        yield
    finally:
        for place, name, own, function in originals:
            if own is None:  # it is inherited
                delattr(place, name)
            else:
                setattr(place, name, function)


def _noting(function: Callable[..., Any], sizes: Collection[int], batch_dim: int, found: dict[str, None]) -> Any:
    @wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _mixes(function.__name__, sizes, batch_dim, *args, **kwargs):
            found[f"a {function.__name__} of the samples of a micro-batch"] = None
        return function(*args, **kwargs)

    return noting


def _mixes(name: str, sizes: Collection[int], batch_dim: int, *args: Any, **kwargs: Any) -> bool:
    first = args[0] if args else kwargs.get("input", kwargs.get("n"))
    if name == "randperm":
        return first in sizes
    if not isinstance(first, Tensor) or first.dim() <= batch_dim or first.shape[batch_dim] not in sizes:
        return False
    dims = _flat(kwargs.get("dims", args[2:] if name == "roll" else args[1:]))
    if not dims:
        return name == "roll"  # of all elements
    return batch_dim in {dim % first.dim() for dim in dims}


def _flat(dims: Any) -> list[int]:
    return [one for dim in dims for one in _flat(dim)] if isinstance(dims, (tuple, list)) else [dims]

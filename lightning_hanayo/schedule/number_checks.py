"""Number: checks the sizes, costs, bytes and budgets that a user gives."""

from collections.abc import Collection
from dataclasses import fields
from numbers import Integral, Real
from reprlib import repr as repr_of
from typing import Any

from lightning_hanayo.errors import HanayoError

MAX_ACTIONS = 1_000_000
"""of a table that is made: the slowest schedule (v-min) takes a minute for so many, and hanayo-zb half of it"""
MAX_TRIED = MAX_ACTIONS // 5
"""of a table if several schedules or numbers of waves are tried; all together take half a minute"""
LARGEST = 1e60
"""of costs and bytes, in any unit, and 1 / `LARGEST` the smallest above 0: their sums and ratios are finite"""


def is_number(value: Any) -> bool:
    """Whether `value` is a number of at least 0, or infinity. `True`, `"1"` and NaN are not.

    Example:
        >>> [is_number(value) for value in (0, 2.5, -1, True, "1", float("nan"))]
        [True, True, False, False, False, False]
    """
    kind = type(value)
    return kind is not bool and issubclass(kind, Real) and bool(value >= 0)


def is_whole(value: object) -> bool:
    """Whether `value` is a whole number of Python or NumPy. `True` and 2.0 are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_size(value: Any) -> bool:
    """Whether `value` is a whole number of at least 1."""
    return is_whole(value) and bool(value >= 1)


def check_num_actions(num_ranks: int, num_microbatches: int, stages_per_rank: int, *, most: int = MAX_ACTIONS) -> None:
    """Raise `HanayoError` if a table of these sizes would have more actions than `most`, so that it is not even begun.

    Example:
        >>> check_num_actions(2, 10**6, 2)
        Traceback (most recent call last):
        lightning_hanayo.errors.HanayoError: 2 ranks, 1000000 micro-batches and 2 stages per rank make up to 12,000,000
        actions, more than 1,000,000; ...
    """
    stages = 3 * num_ranks * stages_per_rank
    if stages * num_microbatches <= most:
        return
    fitting = most // stages
    fits = f"{fitting:,} micro-batches would do" if fitting else "fewer stages would do"
    sizes = f"{num_ranks} ranks, {num_microbatches} micro-batches and {stages_per_rank} stages per rank"
    raise HanayoError(f"{sizes} make up to {stages * num_microbatches:,} actions, more than {most:,}; {fits}")


def check_numbers(model: Any, meaning: str, but: Collection[str] = ()) -> None:
    """Raise `HanayoError` unless each field of a frozen dataclass is a moderate number or a tuple of such.

    A list becomes a tuple. A field whose default is None may be None. Fields named in `but` are left out.
    """
    for field in fields(model):
        if field.name in but:
            continue
        value = getattr(model, field.name)
        if value is None and field.default is None:
            continue
        if isinstance(value, list):
            object.__setattr__(model, field.name, value := tuple(value))
        values = value if isinstance(value, tuple) else (value,)
        is_moderate = all(is_number(one) and (one == 0 or 1 / LARGEST <= one <= LARGEST) for one in values)
        if not values or not is_moderate:
            raise HanayoError(f"{type(model).__name__}: {field.name}={repr_of(value)}; {meaning}")

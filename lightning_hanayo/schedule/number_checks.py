"""Number: checks the sizes, costs, bytes and budgets that a user gives."""

from dataclasses import fields
from math import inf
from numbers import Real
from typing import Any

from lightning_hanayo.errors import HanayoError


def is_number(value: Any) -> bool:
    """Whether `value` is a number of at least 0, or infinity. `True`, `"1"` and NaN are not.

    Example:
        >>> [is_number(value) for value in (0, 2.5, -1, True, "1", float("nan"))]
        [True, True, False, False, False, False]
    """
    kind = type(value)
    return kind is not bool and issubclass(kind, Real) and bool(value >= 0)


def is_size(value: object) -> bool:
    """Whether `value` is a whole number of at least 1."""
    return isinstance(value, int) and value >= 1


def check_numbers(model: Any, meaning: str) -> None:
    """Raise `HanayoError` unless each field of a frozen dataclass is a finite number or a tuple of such.

    A list becomes a tuple. A field whose default is None may be None.
    """
    for field in fields(model):
        value = getattr(model, field.name)
        if value is None and field.default is None:
            continue
        if isinstance(value, list):
            object.__setattr__(model, field.name, value := tuple(value))
        values = value if isinstance(value, tuple) else (value,)
        if not values or not all(is_number(one) and one < inf for one in values):
            raise HanayoError(f"{type(model).__name__}: {field.name}={value!r}; {meaning}")

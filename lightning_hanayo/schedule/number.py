"""Number: what counts as one where a user gives costs, bytes or a budget."""

from numbers import Real
from typing import Any


def is_number(value: Any) -> bool:
    """Whether `value` is a number of at least 0, infinity too; `True`, `"1"` and NaN are none.

    Example:
        >>> [is_number(value) for value in (0, 2.5, -1, True, "1", float("nan"))]
        [True, True, False, False, False, False]
    """
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value >= 0)  # type: ignore[operator]

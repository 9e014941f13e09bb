"""Which cases of a grid run by default, and which in `tox -e thorough` only."""

from collections.abc import Iterable
from typing import Any

import pytest


def covered(grid: Iterable[Any], by: Iterable[Any]) -> list[Any]:
    """The grid for `parametrize`: those of its cases that aren't in `by` are marked thorough.

    A case is a value, or a tuple of values for several parameters. `by` covers the grid: each value of each parameter
    that goes another way through the code is in one of its cases.

    Example:
        >>> CASES = covered(product(MODELS, LAYOUTS), by=[("gpt", WAVE), ("bert", LOOP)])
        >>> @pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
    """
    cover, cases = list(by), []
    for case in grid:
        marks = () if case in cover else (pytest.mark.thorough,)
        cases.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return cases

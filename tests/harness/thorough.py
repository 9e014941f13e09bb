"""Selects the cases of a parametrized test that run by default; the others run in `tox -e thorough` only."""

from collections.abc import Iterable
from typing import Any

import pytest


def covered(cases: Iterable[Any], by: Iterable[Any]) -> list[Any]:
    """The cases for `parametrize`. Those that aren't in `by` are marked thorough.

    A case is a value, or a tuple of values for several parameters. `by` must cover the cases: each value of a parameter
    that takes a different path through the code is in one of them.

    Example:
        >>> CASES = covered(product(MODELS, LAYOUTS), by=[("gpt", WAVE), ("bert", LOOP)])
        >>> @pytest.mark.parametrize(("model", "layout"), CASES, ids=str)
    """
    default, marked = list(by), []
    for case in cases:
        marks = () if case in default else (pytest.mark.thorough,)
        marked.append(pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=marks))
    return marked

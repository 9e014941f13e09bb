"""Values of two runs are compared by name, in the order in which a step makes them."""

from math import inf, nan

import pytest
import torch
from torch import Tensor

from lightning_hanayo.checking.comparison import EXACT, KINDS, ROUNDED, Comparison, Key, Kind, Values, compare

ONES = torch.ones(3, dtype=torch.float64)


def values(scale: float = 1.0, **changed: Tensor) -> Values:
    """Two steps of all kinds; `changed` are values of the first step, by kind."""
    return {Key(step, kind, f"a {kind}"): ONES * scale for step in range(2) for kind in KINDS} | {
        Key(0, kind, f"a {kind}"): value  # type: ignore[arg-type]
        for kind, value in changed.items()
    }


def one(expected: Tensor, actual: Tensor, kind: Kind = "weight") -> Comparison:
    key = Key(0, kind, "x")
    return compare({key: expected}, [{key: actual}], EXACT)


def test_equal_values_are_exact() -> None:
    compared = compare(values(), [values()], EXACT)
    assert compared.is_exact and compared.gap == 0.0
    assert compared.num_values == dict.fromkeys(KINDS, 2)


def test_rounding_is_within_the_tolerance() -> None:
    compared = compare(values(), [values(1 + 1e-12)], EXACT)
    assert compared.is_exact and 1e-13 < compared.gap < 1e-11


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_differs_is_named(kind: Kind) -> None:
    compared = compare(values(), [values(**{kind: 2 * ONES})], EXACT)
    (difference,) = compared.differences
    assert difference.key == Key(0, kind, f"a {kind}")
    assert (difference.expected, difference.actual) == (1.0, 2.0)
    assert compared.largest[kind] == 1.0


def test_differences_come_in_the_order_of_their_making() -> None:
    compared = compare(values(), [values(2.0)], EXACT)
    assert [(one.key.step, one.key.kind) for one in compared.differences] == [
        (s, kind) for s in range(2) for kind in KINDS
    ]


def test_the_element_that_is_farthest_off_is_shown() -> None:
    (difference,) = one(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.1, 2.5, 3.0])).differences
    assert (difference.expected, difference.actual) == (2.0, 2.5)
    assert difference.gap == pytest.approx(0.5 / 3)


def test_a_value_of_rounding_errors_is_measured_by_the_largest_of_its_kind() -> None:
    noise = {Key(0, "gradient", "large"): ONES, Key(0, "gradient", "zero"): 1e-18 * ONES}
    other = noise | {Key(0, "gradient", "zero"): -1e-18 * ONES}
    assert compare(noise, [other], EXACT).is_exact


def test_a_small_value_that_is_wrong_is_found() -> None:
    small = {Key(0, "gradient", "large"): ONES, Key(0, "gradient", "small"): 1e-8 * ONES}
    other = small | {Key(0, "gradient", "small"): 2e-8 * ONES}
    assert not compare(small, [other], EXACT).is_exact


@pytest.mark.parametrize(
    ("expected", "actual", "is_exact"),
    [
        (torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0]), True),
        (torch.tensor([inf, 1.0]), torch.tensor([inf, 1.0]), True),
        (torch.tensor([1.0, 1.0]), torch.tensor([nan, 1.0]), False),
        (torch.tensor([nan, 1.0]), torch.tensor([1.0, 1.0]), False),
        (torch.tensor([inf, 1.0]), torch.tensor([-inf, 1.0]), False),
        (torch.tensor([1, 2]), torch.tensor([1, 2]), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 1j]), True),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 2j]), False),
        (torch.empty(0), torch.empty(0), True),
        (torch.zeros(2), torch.zeros(2), True),
        (torch.zeros(2), torch.tensor([0.0, 1e-3]), False),
        (torch.tensor(1.0), torch.tensor([1.0]), False),
    ],
    ids=str,
)
def test_special_values(expected: Tensor, actual: Tensor, is_exact: bool) -> None:
    assert one(expected, actual).is_exact is is_exact


def test_a_missing_value_differs() -> None:
    (difference,) = compare({Key(0, "weight", "x"): ONES}, [{}], EXACT).differences
    assert difference.gap == inf and difference.note == "the layout has no such value"


def test_a_surplus_value_differs_unless_it_is_logged() -> None:
    surplus = {Key(0, "buffer", "x"): ONES, Key(0, "log", "y"): ONES}
    (difference,) = compare({}, [surplus], EXACT).differences
    assert difference.key.name == "x" and difference.note == "one process has no such value"


def test_no_gradient_is_a_gradient_of_zero() -> None:
    assert compare({Key(0, "gradient", "x"): torch.zeros(3)}, [{}], EXACT).is_exact


def test_a_data_rank_that_differs_is_named() -> None:
    expected = {Key(0, "weight", "x"): ONES, Key(0, "buffer", "y"): ONES}
    compared = compare(expected, [expected, {Key(0, "weight", "x"): 2 * ONES}], EXACT)
    (difference,) = compared.differences
    assert difference.data_rank == 1


def test_rounded_values_have_a_larger_tolerance() -> None:
    assert compare(values(), [values(1 + 1e-6)], ROUNDED).is_exact
    assert not compare(values(), [values(1 + 1e-6)], EXACT).is_exact
    assert not compare(values(), [values(1 + 1e-2)], ROUNDED).is_exact

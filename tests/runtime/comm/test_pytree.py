"""A tree that is flattened and put together again is the same."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.capture.code_between_blocks import Proxy
from lightning_hanayo.pipeline_parallel.pytree import (
    Flattener,
    hidden_part,
    renumber,
    tensor_indices,
    unflatten,
    value_paths,
)

TENSORS = [torch.arange(3), torch.ones(2, 2), torch.zeros(())]
PLAIN = some.none() | some.booleans() | some.integers() | some.floats(allow_nan=False) | some.text(max_size=5)
LEAVES = PLAIN | some.sampled_from([*TENSORS, torch.bfloat16, torch.Size([2, 0])])
TREES = some.recursive(
    LEAVES,
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.lists(inner, max_size=3).map(tuple)
        | some.dictionaries(some.text(max_size=3) | some.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal, of the same types all the way down, and the very same tensors."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a is b
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return all(map(same, a, b)) and len(a) == len(b) if isinstance(a, (tuple, list)) else bool(a == b)


@given(TREES)
def test_round_trip(tree: Any) -> None:
    flattener = Flattener()
    skeleton = flattener.flatten(tree)
    hash(skeleton)
    assert same(unflatten(skeleton, flattener.tensors), tree)


def test_a_tensor_that_occurs_twice_is_listed_once() -> None:
    a, b = torch.ones(2), torch.ones(2)
    flattener = Flattener()
    first, second = flattener.flatten((a, [b, a])), flattener.flatten({"b": b})
    assert [id(t) for t in flattener.tensors] == [id(a), id(b)]
    assert (tensor_indices(first), tensor_indices(second)) == ([0, 1], [1])


def test_equal_values_of_several_types_or_signs_are_several_calls() -> None:
    skeletons = {Flattener().flatten({"causal": value}) for value in (True, 1, 1.0, "1", None, 0.0, -0.0)}
    assert len(skeletons) == 7


def test_another_list_of_tensors() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    skeleton = Flattener().flatten((a, {"x": [b, a, 3]}))
    assert same(unflatten(renumber(skeleton, {0: 1, 1: 0}), [b, a]), (a, {"x": [b, a, 3]}))


def test_output_references_are_filled() -> None:
    skeleton = Flattener().flatten((Proxy(("h", 0)), 1))
    assert unflatten(skeleton, [], lambda path, block: path) == (("h", 0), 1)


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        (object(), r"argument 0 is a builtins\.object"),
        ([1, {"mask": {2, 3}}], r"argument 0\[1\]\['mask'\] is a builtins\.set"),
        ((torch.device("cpu"),), r"argument 0\[0\] is a torch\.device"),
        ({"f": [len]}, r"argument 0\['f'\]\[0\] is a builtins\.builtin_function_or_method"),
    ],
)
def test_an_unsupported_value_is_named_by_its_path(tree: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=named):
        Flattener().flatten(tree, "argument 0")


def test_an_ordered_dict_arrives_as_a_dict() -> None:
    assert unflatten(Flattener().flatten(OrderedDict(a=1)), []) == {"a": 1}


@pytest.mark.parametrize(
    ("seen", "returned", "part"),
    [
        ((1, None), (2, None), ""),
        ((1, None), (2, 3), "output[1]"),
        ((1, 2), (2, None), ""),
        ((1,), (2, 3), "output[1]"),
        ({"x": 1}, {"x": 1, "loss": 2}, "output['loss']"),
        ({"x": 1}, {"x": 1, "loss": None}, ""),
        (1, {"x": 1}, ""),
        ((1, [2, None]), (1, [2, 3]), "output[1][1]"),
        ((1, 2), TENSORS[0], "output"),
        (None, 1, "output"),
    ],
    ids=str,
)
def test_what_code_misses_that_sees_another_structure(seen: Any, returned: Any, part: str) -> None:
    assert hidden_part(value_paths(seen), returned, "output") == part

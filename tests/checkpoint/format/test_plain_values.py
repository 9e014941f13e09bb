"""Values as JSON, without pickle: what is read equals what was written; an impossible document is an error of ours."""

import json
import math
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, namedtuple
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_hanayo.dist_checkpointing import state
from lightning_hanayo.dist_checkpointing.state import decode, encode
from lightning_hanayo.errors import CheckpointError, UnsupportedError


def written_and_read(value: Any) -> Any:
    document, tensors = encode(value, "state")
    return decode(json.loads(json.dumps(document, allow_nan=False)), tensors.__getitem__)


def same(one: Any, other: Any) -> bool:
    """Whether both have the same class and value, to the last bit; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, dict):
        return same(list(one), list(other)) and same(list(one.values()), list(other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


floats = st.floats(allow_nan=True).map(lambda value: math.nan if math.isnan(value) else value)
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda children: st.lists(children, max_size=3).map(tuple) | st.frozensets(children, max_size=3),
    max_leaves=4,
)
values = st.recursive(
    keys | floats | st.complex_numbers(allow_nan=False) | st.datetimes() | st.dates() | st.timedeltas(),
    lambda children: (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(keys, children, max_size=4)
        | st.dictionaries(st.text(), children, max_size=4).map(OrderedDict)
        | st.sets(keys, max_size=4)
    ),
    max_leaves=12,
)
documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda children: (
        st.lists(children, max_size=4)
        | st.dictionaries(st.text(max_size=3), children, max_size=2)
        | st.dictionaries(
            st.sampled_from(["dict", "tensor", *state._CODECS]),
            children
            | st.lists(st.sampled_from(["<f4", "<U99999999999", "<M8[s]", "|S0", "00000000", "int", 0, 2**62, -1])),
            max_size=1,
        )
    ),
    max_leaves=12,
)


@given(values)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert same(written_and_read(value), value)


@given(documents)
def test_any_document_is_read_or_is_an_error_of_ours(document: Any) -> None:
    with suppress(CheckpointError):
        decode(document, [torch.arange(4, dtype=torch.uint8)].__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        2**20_000,
        -(2**63) - 1,
        -0.0,
        5e-324,
        {"float": "nan"},
        {"dict": [1]},
        {1: "a", "1": "b"},
        OrderedDict(b=1, a=2),
        Counter({30: 1, 60: 2}),
        defaultdict(list, {"a": [1]}),
        defaultdict(None, {"a": 1}),
        Namespace(lr=0.1, layers=(1, 2)),
        torch.Size((2, 3)),
        torch.bfloat16,
        torch.device("cuda", 1),
        Path("a/b"),
        datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC),
        date(2026, 1, 2),
        timedelta(days=-1, microseconds=3),
        np.float32(0.1),
        np.float64(0.1),
        np.int64(-3),
        np.bool_(True),
        np.str_("text"),
        np.datetime64("2026-01-02T03:04:05"),
        "\ud800",
        "",
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_of_each_class_comes_back(value: Any) -> None:
    assert same(written_and_read(value), value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3).T,
        np.array(3.5),
        np.zeros((0, 4)),
        np.array(["a", "bcd"]),
        np.array(["2026-01-02"], dtype="M8[D]"),
        np.array([1 + 2j]),
        np.arange(3, dtype=">i4"),
    ],
    ids=lambda array: array.dtype.str,
)
def test_an_array_comes_back(array: Any) -> None:
    read = written_and_read(array)
    assert (read.dtype, read.shape) == (array.dtype, array.shape) and np.array_equal(read, array)
    assert read.flags.writeable


def test_random_generators_states_come_back() -> None:
    import random

    assert written_and_read(random.getstate()) == random.getstate()
    before, after = np.random.get_state(), written_and_read(np.random.get_state())
    assert np.array_equal(before[1], after[1]) and before[2:] == after[2:]


def test_tensors_are_given_by_number() -> None:
    weight = nn.Parameter(torch.ones(2))
    document, tensors = encode({"a": [torch.tensor(3, dtype=torch.bfloat16)], "b": weight}, "state")
    assert document == {"dict": {"a": [{"tensor": 0}], "b": {"tensor": 1}}}
    read = decode(document, tensors.__getitem__)
    assert torch.equal(read["a"][0], torch.tensor(3, dtype=torch.bfloat16)) and type(read["b"]) is torch.Tensor


class Averages:
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value, message",
    [
        ({"EMA": {"decay": Averages()}}, "callbacks['EMA']['decay'] is a "),
        ({"EMA": [1, Point(1, 2)]}, "callbacks['EMA'][1] is a "),
        ({3: lambda: None}, "callbacks[3] is a builtins.function"),
        ({"a": np.array([None])}, "callbacks['a'] is a numpy.ndarray"),
        ({"a": defaultdict(Averages)}, "callbacks['a'] is a collections.defaultdict"),
        ({"a": torch.empty(2, device="meta")}, "callbacks['a'] is a tensor without values"),
        ({"a": torch.nn.UninitializedBuffer()}, "callbacks['a'] is a torch.nn.parameter.UninitializedBuffer"),
        ({Averages: 1}, "is a builtins.type, which can't be stored without pickle"),
    ],
    ids=lambda value: "",
)
def test_what_cannot_be_stored_is_named_with_the_path_to_it(value: Any, message: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        encode(value, "callbacks")
    assert message in str(raised.value)


def test_a_sparse_tensor_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"callbacks\['a'\].*sparse"):
        encode({"a": torch.eye(2).to_sparse()}, "callbacks")


def test_a_list_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(UnsupportedError, match="contains itself"):
        encode(value, "callbacks")


def test_a_missing_tensor_and_deep_nesting_are_errors_of_the_checkpoint() -> None:
    with pytest.raises(CheckpointError, match="'tensor'"):
        decode({"tensor": 3}, [].__getitem__)
    deep: Any = 0
    for _ in range(500):
        deep = {"tuple": [deep]}
    with pytest.raises(CheckpointError, match="nested more than 100 deep"):
        decode(deep, [].__getitem__)


def test_no_pickle_is_imported() -> None:
    assert "import pickle" not in Path(str(state.__file__)).read_text(encoding="utf-8")

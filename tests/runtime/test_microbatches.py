"""A batch is split into micro-batches, and the results of the steps are merged.

11 samples, 4 micro-batches   [0 1 2] [3 4 5] [6 7 8] [9 10]
"""

from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from lightning_hanayo.errors import HanayoError, UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.merge import PieceSizes
from lightning_hanayo.pipeline_parallel.batches.merge import merge as merge_pieces
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchRule, signature, sizes
from lightning_hanayo.pipeline_parallel.batches.reader import BatchReader

Pair = namedtuple("Pair", "x y")
PARTS = [3, 3, 3, 2]
X = torch.arange(22).reshape(11, 2)
NAMES = [f"n{i}" for i in range(11)]


@dataclass
class Sample:
    x: Tensor
    names: list[str]
    scale: float = 2.0


class Attributes(dict[str, Any]):
    """Items as attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Scaled(dict[str, Any]):
    """Has more than its items, which its __init__ takes first."""

    def __init__(self, scale: float, items: dict[str, Any]) -> None:
        super().__init__(items)
        self.scale = scale


class ReadOnly(Mapping[str, Any]):
    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Changeable(ReadOnly, MutableMapping[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]


class Unpacked(ReadOnly):
    """Can be constructed from its own arguments only."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__({"x": x, "y": y})


class Sliced(ReadOnly):
    """Defines slices of samples, as a `TensorDict` does, and can't be constructed from a dictionary."""

    def __init__(self, items: Mapping[str, Any], batch_size: int) -> None:
        super().__init__(items)
        self.batch_size = batch_size

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return super().__getitem__(key)
        items = {name: value[key] for name, value in self.items()}
        return Sliced(items, len(items["x"]))


class Noted(ReadOnly):
    """Constructed from a dictionary, it loses its note."""

    def __init__(self, items: Mapping[str, Any], note: str = "") -> None:
        super().__init__(items)
        self.note = note


class Labelled(UserDict[str, Any]):
    """Has a name for each sample, and a number."""

    def __init__(self, items: dict[str, Any] | None = None) -> None:
        super().__init__(items)
        self.names, self.scale = list(NAMES), 2.0


class LabelledList(list[Any]):
    names: list[str]


@dataclass
class Fields(Mapping[str, Any]):
    """A dataclass that can be read like a dictionary."""

    x: Tensor | None = None
    y: Tensor | None = None

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


def num_samples(batch: Any) -> int:
    (samples,) = BatchReader(BatchRule()).plan(batch).part_sizes
    return samples


def split(batch: Any, parts: list[int]) -> list[Any]:
    plan = BatchReader(BatchRule()).plan(batch)
    return [plan.select(batch, [range(end - size, end)]) for end, size in zip(accumulate(parts), parts, strict=True)]


def merge(results: Any, parts: list[int], weights: list[float], *, has_loss: bool = False) -> Any:
    return merge_pieces(results, PieceSizes([parts]), weights, has_loss=has_loss)


@given(some.integers(1, 200), some.integers(1, 40))
def test_sizes(samples: int, microbatches: int) -> None:
    found = sizes(samples, microbatches)
    assert sum(found) == samples and len(found) == min(samples, microbatches)
    assert found == sorted(found, reverse=True) and found[0] - found[-1] <= 1 and found[-1] >= 1


def text_batch() -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": X, "labels": X[:, 0]})


def model_output(x: Tensor, y: Tensor) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=y)


BATCHES = {  # batch -> where its samples are, in a micro-batch
    "tensor": (X, lambda b: [b]),
    "tuple": ((X, X[:, 0]), lambda b: [b[0], b[1]]),
    "list": ([X, X[:, 0]], lambda b: [b[0], b[1]]),
    "dict": ({"x": X, "names": NAMES}, lambda b: [b["x"], b["names"]]),
    "ordered": (OrderedDict(x=X, more={"y": X}), lambda b: [b["x"], b["more"]["y"]]),
    "namedtuple": (Pair(X, NAMES), lambda b: [b.x, b.y]),
    "dataclass": (Sample(X, NAMES), lambda b: [b.x, b.names]),
    "transformers": (text_batch(), lambda b: [b.input_ids, b["labels"]]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_containers_are_cut_and_keep_their_type(kind: str) -> None:
    batch, samples = BATCHES[kind]
    pieces = split(batch, PARTS)
    assert [type(piece) for piece in pieces] == [type(batch)] * 4 and num_samples(batch) == 11
    for whole, parts in zip(samples(batch), zip(*map(samples, pieces), strict=True), strict=True):
        assert [len(part) for part in parts] == PARTS
        if isinstance(whole, Tensor):
            assert torch.equal(torch.cat(parts), whole)
        else:
            assert sum(parts, []) == whole


MAPPINGS = {
    "defaultdict": lambda x, y: defaultdict(list, x=x, y=y),
    "OrderedDict": lambda x, y: OrderedDict(x=x, y=y),
    "UserDict": lambda x, y: UserDict(x=x, y=y),
    "nested": lambda x, y: defaultdict(list, x=x, more=UserDict(y=defaultdict(None, y=y))),
    "items as attributes": lambda x, y: Attributes(x=x, y=y),
    "more than items": lambda x, y: Scaled(2.0, {"x": x, "y": y}),
    "Mapping": lambda x, y: ReadOnly({"x": x, "y": y}),
    "MutableMapping": lambda x, y: Changeable({"x": x, "y": y}),
    "a view": lambda x, y: MappingProxyType({"x": x, "y": y}),
    "a dataclass": Fields,
    "transformers' output": model_output,
}


@pytest.mark.parametrize("kind", MAPPINGS)
def test_mappings_are_cut_and_merged(kind: str) -> None:
    batch = MAPPINGS[kind](X, X[:, 0])
    pieces = split(batch, PARTS)
    assert [num_samples(piece) for piece in pieces] == PARTS and num_samples(batch) == 11
    merged = merge(pieces, PARTS, WEIGHTS)
    for made in (*pieces, merged):
        assert type(made) is type(batch) and list(made) == list(batch)
        for attribute in ("default_factory", "scale"):
            assert getattr(made, attribute, None) == getattr(batch, attribute, None)
    assert all(str(merged[key]) == str(batch[key]) for key in batch)


def test_a_class_is_cut_by_the_slices_that_it_defines() -> None:
    made = split((Sliced({"x": X, "y": X[:, 0]}, 11), UserList(NAMES), range(11)), PARTS)
    assert [batch.batch_size for batch, *_ in made] == PARTS
    assert torch.equal(made[3][0]["x"], X[9:]) and made[3][1] == UserList(NAMES[9:]) and made[3][2] == range(9, 11)


def test_what_is_stored_beside_items_is_cut_too() -> None:
    listed = LabelledList([X, X[:, 0]])
    listed.names = NAMES
    for batch in (Labelled({"x": X}), listed):
        made = split(batch, PARTS)
        assert [piece.names for piece in made] == [NAMES[:3], NAMES[3:6], NAMES[6:9], NAMES[9:]]
        assert batch.names == NAMES and [getattr(piece, "scale", 2.0) for piece in made] == [2.0] * 4


def test_a_mapping_that_would_lose_something_is_refused() -> None:
    assert split(Noted({"x": X}), PARTS)[0].note == ""
    with pytest.raises(HanayoError, match=r"Noted can't be made with other values.*slices of samples"):
        split(Noted({"x": X}, "important"), PARTS)


def test_a_tensordict_keeps_its_batch_size() -> None:
    tensordict = pytest.importorskip("tensordict")
    made = split(tensordict.TensorDict({"x": X, "inside": {"y": X}}, batch_size=[11]), PARTS)
    for piece, size in zip(made, PARTS, strict=True):
        assert piece.batch_size == piece["inside"].batch_size == torch.Size([size])
        piece["inside", "y"].add_(0)
    assert [piece["inside", "y"]._version for piece in made] == [1] * 4
    assert merge(made, PARTS, WEIGHTS).batch_size == torch.Size([11])


CHANGED = {
    "dict": lambda x: {"x": x},
    "tuple": lambda x: (x,),
    "slices": lambda x: Sliced({"x": x}, 11),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_each_micro_batch_may_be_changed_in_place(kind: str) -> None:
    """Autograd sees the changes of a micro-batch alone, and the batch is changed."""
    x, weight = torch.ones(11, 2), torch.ones(2, requires_grad=True)
    losses = []
    for piece in split(CHANGED[kind](x), PARTS):
        rows = piece[0] if kind == "tuple" else piece["x"]
        losses.append((rows.add_(1) * weight).sum())
    sum(losses).backward()
    assert weight.grad.tolist() == [22, 22] and torch.equal(x, torch.full((11, 2), 2.0))


def test_lists_and_dictionaries_that_stay_whole_are_not_shared() -> None:
    batch = {"x": X, "meta": {"scale": 2.0}, "sizes": [1, 2]}
    for piece in split(batch, PARTS):
        assert piece["meta"].pop("scale") == 2.0
        piece["sizes"].append(3)
    assert batch["meta"] == {"scale": 2.0} and batch["sizes"] == [1, 2]


def test_items_that_are_attributes_are_cut_as_such() -> None:
    assert torch.equal(split(Attributes(x=X), PARTS)[3].x, X[9:])


def test_counts_stay_counts() -> None:
    cut = split({"x": X, "words": Counter("abca")}, PARTS)
    assert [piece["words"] for piece in cut] == [Counter("abca")] * 4 and type(cut[0]["words"]) is Counter


def test_a_mapping_that_cant_be_made_raises_an_error_with_advice() -> None:
    with pytest.raises(
        HanayoError, match=r"Unpacked can't be made with other values.* Let its __init__ take a dictionary"
    ):
        split(Unpacked(X, X), PARTS)


def test_values_of_all_samples_are_shared() -> None:
    mask, flag = torch.ones(1, 5), torch.tensor(1.0)
    for piece in split({"x": X, "mask": mask, "flag": flag, "k": 3, "some": ["a", "b"]}, PARTS):
        assert piece["mask"] is mask and piece["flag"] is flag and (piece["k"], piece["some"]) == (3, ["a", "b"])


def test_a_batch_without_tensors_raises_an_error() -> None:
    for batch in ({"scalar": torch.tensor(1)}, {"names": ["a"], "others": ["b", "c"]}):
        with pytest.raises(HanayoError, match="a batch of type dict has no tensor or list to cut"):
            num_samples(batch)


def test_signature_differs_by_shape_cut_and_kind() -> None:
    others = [
        signature({"x": X}, [PARTS], "train"), signature({"x": X[:, :1]}, [PARTS], "train"),
        signature({"x": X.float()}, [PARTS], "train"), signature({"x": X}, [[6, 5]], "train"),
        signature({"x": X}, [PARTS], "validate"),
    ]  # fmt: skip
    assert len(set(others)) == len(others) and signature({"x": X + 1}, [PARTS], "train") == others[0]


def pieces(make: Any) -> list[Any]:
    return [make(part) for part in X.split(PARTS)]


WEIGHTS = [0.5, 0.25, 0.25, 0.0]


def test_samples_are_concatenated() -> None:
    assert torch.equal(merge(pieces(lambda x: x), PARTS, WEIGHTS), X)
    logits, hidden = merge(pieces(lambda x: [x, x[:, 0]]), PARTS, WEIGHTS)
    assert torch.equal(logits, X) and torch.equal(hidden, X[:, 0])
    array = merge(pieces(lambda x: x.numpy()), PARTS, WEIGHTS)
    assert isinstance(array, np.ndarray) and array.shape == (11, 2)
    assert merge(pieces(lambda x: [str(i) for i in x[:, 0].tolist()]), PARTS, WEIGHTS) == [
        str(2 * i) for i in range(11)
    ]


def test_a_list_of_one_tensor_per_sample_is_concatenated() -> None:
    ragged = merge(pieces(lambda x: [torch.zeros(int(i) % 5) for i in x[:, 0]]), PARTS, WEIGHTS)
    assert [len(t) for t in ragged] == [2 * i % 5 for i in range(11)]
    boxes = merge(pieces(lambda x: [{"box": row} for row in x]), PARTS, WEIGHTS)
    assert len(boxes) == 11 and torch.equal(boxes[10]["box"], X[10])


@pytest.mark.parametrize("kind", [Pair, lambda x, y: Sample(x, y), lambda x, y: {"x": x, "y": y}, lambda x, y: (x, y)])
def test_containers_keep_their_type(kind: Any) -> None:
    whole = merge(pieces(lambda x: kind(x, ["n"] * len(x))), PARTS, WEIGHTS)
    expected = kind(X, ["n"] * 11)
    assert type(whole) is type(expected) and str(whole) == str(expected)


def test_numbers_are_averaged_with_their_shares() -> None:
    results = [{"loss": torch.tensor(v), "f": v, "text": "a"} for v in (1.0, 2.0, 4.0, float("nan"))]
    merged = merge(results, PARTS, WEIGHTS)
    assert merged["loss"].item() == 2.0 and merged["text"] == "a" and merge([None] * 4, PARTS, WEIGHTS) is None


@pytest.mark.parametrize("kind", [lambda x: x, lambda x: {"x": x}], ids=["result", "item"])
def test_none_for_some_micro_batches_is_refused(kind: Any) -> None:
    for results in ([None, X, X, X], [X, X, X, None]):
        with pytest.raises(UnsupportedError, match=r"outputs.*: the step returns None for some micro-batches"):
            merge([kind(result) for result in results], PARTS, WEIGHTS)


def test_the_loss_of_a_training_step_is_averaged_in_its_shape() -> None:
    """[1.0] [2.0] [4.0] [nan], of one sample each: in other results they are samples, here one loss."""
    losses = [torch.tensor([value]) for value in (1.0, 2.0, 4.0, float("nan"))]
    parts = [1, 1, 1, 1]
    assert merge(losses, parts, WEIGHTS).shape == (4,)
    assert torch.equal(merge(losses, parts, WEIGHTS, has_loss=True), torch.tensor([2.0]))
    results = [{"loss": loss, "predicted": loss} for loss in losses]
    merged = merge(results, parts, WEIGHTS, has_loss=True)
    assert torch.equal(merged["loss"], torch.tensor([2.0])) and merged["predicted"].shape == (4,)
    assert torch.equal(merge(losses, PARTS, WEIGHTS, has_loss=True), torch.tensor([2.0])), "larger micro-batches"


def test_integers_are_counts() -> None:
    sizes, weights = [3, 2], [0.6, 0.4]
    assert merge([{"n": 3, "epoch": 1}, {"n": 2, "epoch": 1}], sizes, weights) == {"n": 5, "epoch": 1}
    with pytest.warns(UserWarning, match=r"outputs\['correct'\]: the step returns an integer .* added"):
        merged = merge([{"correct": torch.tensor(1)}, {"correct": torch.tensor(1)}], sizes, weights)
    assert merged["correct"].item() == 2
    with pytest.warns(UserWarning, match=r"outputs\['correct'\]: the step returns a whole number as a float"):
        merge([{"correct": torch.tensor(3.0)}, {"correct": torch.tensor(1.0)}], sizes, weights)


def test_tensors_without_samples_that_differ_are_named() -> None:
    assert merge([torch.eye(2), torch.eye(2)], [3, 3], [0.5, 0.5]).equal(torch.eye(2))
    with pytest.warns(match=r"outputs\['confusion'\]: the step returns Tensors of shape \(2, 2\)"):
        merge([{"confusion": torch.eye(2)}, {"confusion": torch.ones(2, 2)}], [3, 3], [0.5, 0.5])


def test_what_equals_a_loss_that_is_a_sum_is_added_up_and_other_values_are_averaged() -> None:
    results = [
        {"loss": torch.tensor(loss), "logged": loss, "accuracy": torch.tensor(accuracy)}
        for loss, accuracy in ((3.5, 0.5), (5.5, 0.75))
    ]
    merged = merge_pieces(results, PieceSizes([[3, 1]]), [0.75, 0.25], in_loss=[1.0, 1.0], has_loss=True)
    assert {name: float(value) for name, value in merged.items()} == {"loss": 9, "logged": 9, "accuracy": 0.5625}

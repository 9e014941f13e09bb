"""What a batch is read as: how many samples, and which tensors and lists are cut.

x [8, 16]   y [8]       8 samples        x [5, 8, 16]   y [8]      8 samples with batch_dim=1, otherwise refused
"""

import warnings
from collections import deque, namedtuple
from dataclasses import InitVar, dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchRule, BatchSource
from lightning_hanayo.pipeline_parallel.batches.reader import BatchReader

Pair = namedtuple("Pair", "x y")
COLLATED = BatchSource(is_collated=True)


def rows(*shape: int) -> Tensor:
    return torch.arange(float(np.prod(shape))).reshape(shape)


def picked(batch: Any, samples: list[int], rule: BatchRule = BatchRule(), **source: Any) -> tuple[int, Any]:  # noqa: B008
    """The number of samples that a batch is read as, and some of them."""
    plan = BatchReader(rule).plan(batch, BatchSource(**source))
    (size,) = plan.part_sizes
    return size, plan.select(batch, [samples])


def test_columns_are_cut_by_rows() -> None:
    for batch in ([rows(8, 2), rows(8)], (rows(8, 2), rows(8)), Pair(rows(8, 2), rows(8))):
        size, (x, y) = picked(batch, [2, 5])
        assert size == 8 and torch.equal(x, batch[0][[2, 5]]) and y.tolist() == [2, 5]


ONE_DIMENSION = {
    "a sample": rows(8),
    "a sample and its label": (rows(8), torch.tensor(1)),
    "tokens and their labels, or users and their ratings": {"x": torch.arange(8), "y": rows(8)},
}


@pytest.mark.parametrize("name", ONE_DIMENSION)
def test_one_dimension_may_be_that_of_features_if_nobody_has_made_a_batch(name: str) -> None:
    batch = ONE_DIMENSION[name]
    with pytest.raises(UnsupportedError, match=r"batch_size=None; .* one dimension: \(8,\).*collate_fn=lambda batch"):
        picked(batch, [0], is_unbatched=True)
    assert picked(batch, [0])[0] == 8


def test_the_only_tensor_with_rows_is_named_if_nobody_has_made_a_batch() -> None:
    reader, batch = BatchReader(BatchRule()), (rows(3, 8, 8), 2)
    with pytest.warns(UserWarning, match=r"batch of 3 samples, by its only tensor with rows, of shape \(3, 8, 8\)"):
        reader.plan(batch, BatchSource(is_unbatched=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reader.plan(batch, BatchSource(is_unbatched=True)).part_sizes == (3,)


READY = [
    (rows(8, 2), rows(8)),
    {"x": rows(8), "name": ["a"] * 8},
    [rows(3), rows(2), *[rows(1)] * 6],
    {"ids": rows(8, 2).long()},
]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("batch", READY, ids=["tensors", "names", "a list", "tokens"])
def test_ready_batches_need_no_word(batch: Any) -> None:
    assert picked(batch, [0], is_unbatched=True)[0] == 8


def test_arrays_are_cut_like_tensors() -> None:
    size, piece = picked({"x": np.arange(8), "sparse": torch.eye(8).to_sparse()}, [1, 2])
    assert size == 8 and piece["x"].tolist() == [1, 2]
    assert torch.equal(piece["sparse"].to_dense(), torch.eye(8)[1:3])


def test_tensors_of_all_samples_stay_whole() -> None:
    table, factor = torch.ones(1, 4), torch.tensor(2.0)
    size, piece = picked({"table": table, "x": rows(8, 2), "factor": factor, "weights": rows(3)}, [0], WHOLE_WEIGHTS)
    assert size == 8 and piece["table"] is table and piece["factor"] is factor and len(piece["weights"]) == 3


WHOLE_WEIGHTS = BatchRule(whole=frozenset({"weights"}))


def test_names_stay_whole_on_any_level() -> None:
    inside = SimpleNamespace(weights=rows(8), x=rows(8))
    _, piece = picked({"a": [inside, rows(8, 2)]}, [3], WHOLE_WEIGHTS)
    assert len(piece["a"][0].weights) == 8 and piece["a"][0].x.tolist() == [3]


RAGGED = [rows(n, 2) for n in (3, 1, 4, 2)]
LISTS: dict[str, tuple[Any, int]] = {
    "tensors of different lengths": (RAGGED, 4),
    "dictionaries with numbers": ([{"x": rows(6), "y": i} for i in range(4)], 4),
    "dictionaries with scalars": ([{"x": rows(6, 2), "y": torch.tensor(i)} for i in range(4)], 4),
    "dictionaries of sequences": ([{"ids": rows(6), "mask": rows(6)} for _ in range(4)], 4),
    "tuples of a picture and a class": ([(rows(3, 5, 5), i) for i in range(4)], 4),
    "dictionaries of different lengths": ([{"boxes": rows(n, 4)} for n in (0, 2, 1, 5)], 4),
    "scalars": ([torch.tensor(float(i)) for i in range(4)], 4),
    "objects": ([SimpleNamespace(x=rows(n)) for n in (1, 2, 3, 3)], 4),
    "texts": (["a", "b", "c", "d"], 4),
    "a single sample": ([{"x": rows(6), "y": 0}], 1),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_samples_are_cut_by_items(name: str) -> None:
    batch, size = LISTS[name]
    found, piece = picked(batch, [size - 1])
    assert found == size and len(piece) == 1 and piece[0] is batch[-1]


def test_lists_next_to_tensors() -> None:
    batch = {"x": rows(4, 2), "boxes": [{"b": box} for box in RAGGED], "names": list("abcd"), "size": (28, 28, 3)}
    size, piece = picked(batch, [1, 2])
    assert size == 4 and [len(one["b"]) for one in piece["boxes"]] == [1, 4]
    assert piece["names"] == ["b", "c"] and piece["size"] == (28, 28, 3)


def test_pairs_of_dictionaries_are_columns() -> None:
    batch = ({"ids": rows(8, 5), "mask": rows(8, 5)}, {"ids": rows(8, 6), "mask": rows(8, 6)})
    size, piece = picked(batch, [7])
    assert size == 8 and [len(one["ids"]) for one in piece] == [1, 1]


def test_pictures_are_a_list_of_samples_even_if_there_are_as_many_as_channels() -> None:
    """8 pictures of 3 channels are certain. Then 3 of them are samples too, not 3 columns."""
    reader = BatchReader(BatchRule())
    for count in (8, 3):
        batch = (tuple(rows(3, 5, 5) for _ in range(count)), tuple({"boxes": rows(i, 4)} for i in range(count)))
        plan = reader.plan(batch)
        assert plan.part_sizes == (count,) and [len(part) for part in plan.select(batch, [[0]])] == [1, 1]


def test_samples_with_one_box_each_are_not_taken_for_columns() -> None:
    batch = [{"image": torch.rand(3, 8, 8), "boxes": torch.rand(1, 4)} for _ in range(4)]
    plan = BatchReader(BatchRule()).plan(batch)
    assert plan.part_sizes == (4,)
    assert plan.select(batch, [range(1, 3)])[0] is batch[1]


def test_a_doubtful_list_is_of_columns_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"batch is a list of 6 items with 4 rows each.* cut as columns.*split_batch"):
        size, piece = picked([rows(4, 2)] * 6, [0])
    assert size == 4 and len(piece) == 6


def test_what_is_certain_needs_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert picked((rows(8, 2), rows(8, 2)), [0])[0] == 8, "what a collate_fn returns"
        assert BatchReader(BatchRule()).plan([rows(2, 4)] * 3, COLLATED).part_sizes == (2,)
        reader = BatchReader(BatchRule())
        for lengths, size in (((1, 2, 3, 4), 4), ((4, 4, 4, 4), 4), ((5, 5), 2)):
            assert reader.plan([rows(n, 2) for n in lengths]).part_sizes == (size,), "as in the first batch"


SEQUENCE_FIRST = BatchRule(batch_dim=1)


def test_sequence_first() -> None:
    batch = {"mask": rows(8, 5), "x": rows(5, 8, 2), "tokens": rows(5, 8), "y": rows(8), "memory": rows(3, 1, 2)}
    size, piece = picked(batch, [2, 3, 6], SEQUENCE_FIRST)
    assert size == 8
    assert {name: tuple(value.shape) for name, value in piece.items()} == {
        "mask": (3, 5), "x": (5, 3, 2), "tokens": (5, 3), "y": (3,), "memory": (3, 1, 2),
    }  # fmt: skip
    assert torch.equal(piece["x"], batch["x"][:, [2, 3, 6]])


def test_a_square_mask_is_cut_as_in_an_earlier_batch() -> None:
    reader = BatchReader(SEQUENCE_FIRST)
    for length in (5, 8):
        batch = {"x": rows(length, 8, 2), "mask": rows(8, length), "y": rows(8)}
        assert reader.plan(batch).select(batch, [[1]])["mask"].shape == (1, length)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    names: list[str]


@dataclass
class Derived:
    x: Tensor
    scale: InitVar[float]
    half: Tensor = field(init=False)

    def __post_init__(self, scale: float) -> None:
        self.x = self.x * scale
        self.half = self.x / 2


@dataclass
class Counted:
    x: Tensor
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.x = self.x + 1
        self.count = len(self.x)


def test_dataclasses() -> None:
    assert picked(Frozen(rows(3), ["a", "b", "c"]), [1])[1] == Frozen(torch.tensor([1.0]), ["b"])
    derived = picked(Derived(rows(3), 10.0), [1, 2])[1]
    assert derived.x.tolist() == [10, 20] and derived.half.tolist() == [5, 10]
    counted = picked(Counted(rows(3)), [1, 2])[1]
    assert counted.x.tolist() == [2, 3] and counted.count == 2, "__post_init__ counts anew, but adds nothing twice"


def test_parts_of_several_loaders_are_read_on_their_own() -> None:
    batch = {"a": (rows(8, 2), rows(8)), "b": [{"x": rows(4, 2)}, None]}
    source = BatchSource(loaders={"a": None, "b": [None, None]})
    plan = BatchReader(BatchRule()).plan(batch, source)
    assert plan.part_sizes == (8, 4) and plan.num_microbatches(4) == 4 and plan.num_microbatches(4, 2) == 2
    piece = plan.select(batch, [[6, 7], [3]])
    assert piece["a"][1].tolist() == [6, 7] and torch.equal(piece["b"][0]["x"], rows(4, 2)[3:])
    odd = BatchReader(BatchRule()).plan([rows(8), rows(5)], BatchSource(loaders=[None, None]))
    assert odd.num_microbatches(4) == 1 and odd.num_microbatches(4, 2) == 0


class Graphs:
    def __init__(self) -> None:
        self.store = {"nodes": rows(9)}


JAGGED = torch.nested.as_nested_tensor([rows(3), rows(2)], layout=torch.jagged)
REFUSED: dict[str, tuple[Any, BatchRule, str]] = {
    "sequence-first": (
        {"x": rows(5, 8, 2), "y": rows(8)}, BatchRule(),
        r"batch\['x'\] \(5, 8, 2\), batch\['y'\] \(8,\)\. Use HanayoStrategy\(batch_dim=1\)",
    ),
    "a table": (
        (rows(8, 2), {"table": rows(5, 2)}, rows(8)), BatchRule(),
        r"batch\[1\]\['table'\] \(5, 2\).* Use HanayoStrategy\(whole=\('table',\)\) if all samples share it",
    ),
    "graphs": ({"nodes": rows(40, 2), "edges": rows(2, 90), "y": rows(8)}, BatchRule(), r"rows.*Use .*split_batch="),
    "two columns": ((rows(40, 2), rows(8, 2)), BatchRule(), r"batch\[0\] \(40, 2\), batch\[1\] \(8, 2\)"),
    "positions": ({"x": rows(5, 8, 2), "at": rows(5), "y": rows(8)}, SEQUENCE_FIRST, r"whole=\('at',\)"),
    "either": ({"x": rows(5, 8), "mask": rows(8, 5)}, SEQUENCE_FIRST, r"batch\['mask'\] \(8, 5\).*split_batch"),
    "an object": ({"x": rows(8), "g": Graphs()}, BatchRule(), r"batch\['g'\] is a Graphs that holds tensors.*'g'"),
    "only an object": (Graphs(), BatchRule(), r"batch is a Graphs that holds tensors.*micro-batches\.$"),
    "a queue": ({"x": rows(8), "q": deque([rows(8)])}, BatchRule(), "is a deque that holds tensors"),
    "a packed sequence": (pack_sequence([rows(3), rows(2)]), BatchRule(), "PackedSequence that holds tensors"),
    "a nested tensor": ({"x": JAGGED}, BatchRule(), "layout jagged or nested"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_the_option_that_helps(name: str) -> None:
    batch, rule, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match=message):
        BatchReader(rule).plan(batch)

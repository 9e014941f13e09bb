"""Habits: types of batches, and how they are cut into micro-batches."""

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.habits.habit import EXACT, Habit, Refused, everywhere
from tests.harness import models
from tests.harness.models import CLASSES, IGNORED, WIDTH
from tests.harness.training import make_loader

SIZES = (8, 8, 6)
LENGTH = 5
VECTORS = partial(models.vectors, SIZES, torch.float64)


def converted(convert: Callable[[dict[str, Tensor]], Any]) -> list[Any]:
    """The batches of vectors in another form."""
    return [convert(batch) for batch in VECTORS()]


def sequences(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    """x [batch, seq, h] with the lengths of the sequences, and y [batch]."""
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(size, LENGTH, WIDTH, generator=generator, dtype=torch.float64),
            "lengths": torch.randint(2, LENGTH + 1, (size,), generator=generator),
            "y": torch.randint(CLASSES, (size,), generator=generator),
        }
        for size in sizes
    ]


# lists of samples


def samples(batch: dict[str, Tensor]) -> list[dict[str, Any]]:
    return [{"x": x, "y": y} for x, y in zip(batch["x"], batch["y"], strict=True)]


class Stacks(models.MLP):
    """Stacks a list of samples in the step."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss({name: torch.stack([sample[name] for sample in batch]) for name in ("x", "y")})


def ragged_sequences() -> list[Any]:
    return [
        {"x": [x[:n] for x, n in zip(batch["x"], batch["lengths"], strict=True)], "y": batch["y"]}
        for batch in sequences()
    ]


class PoolsList(models.MLP):
    """The mean of each sequence in a list goes through the stack."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss({"x": torch.stack([x.mean(0) for x in batch["x"]]), "y": batch["y"]})


def pictures_with_boxes() -> list[Any]:
    """(pictures, targets), where a target has 0 to 3 boxes with labels."""
    generator = torch.Generator().manual_seed(4)

    def target(index: int) -> dict[str, Tensor]:
        boxes = torch.rand(index % 4, 4, generator=generator, dtype=torch.float64)
        return {"boxes": boxes, "labels": torch.randint(CLASSES, (index % 4,), generator=generator)}

    return [(batch["x"], [target(i) for i in range(len(batch["x"]))]) for batch in VECTORS()]


class Detects(models.MLP):
    """The loss is the mean over pictures of the sum over their boxes."""

    def loss(self, batch: Any) -> Tensor:
        pictures, targets = batch
        scores = self(pictures)
        per_picture = [
            functional.cross_entropy(one.expand(len(target["labels"]), -1), target["labels"], reduction="sum")
            + target["boxes"].sum() * one.square().mean()
            for one, target in zip(scores, targets, strict=True)
        ]
        return torch.stack(per_picture).mean()


# several loaders


def two_loaders() -> dict[str, Any]:
    """Batches of 8 and of 4 samples."""
    return {"labelled": make_loader(VECTORS()[:2] * 2), "other": make_loader(models.vectors((4, 4, 4), torch.float64))}


class TwoLosses(models.MLP):
    """The sum of two means, each over the part of one loader; the stack runs once for both."""

    def loss(self, batch: Any) -> Tensor:
        parts = [batch["labelled"], batch["other"]]
        scores = self(torch.cat([part["x"] for part in parts])).split([len(part["x"]) for part in parts])
        return functional.cross_entropy(scores[0], parts[0]["y"]) + scores[1].square().mean()


# containers


@dataclass
class Inputs:
    x: Tensor
    names: list[str]


@dataclass
class Sample:
    inputs: Inputs
    y: Tensor
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.y)


def as_dataclass(batch: dict[str, Tensor]) -> Sample:
    return Sample(Inputs(batch["x"], [f"n{i}" for i in range(len(batch["x"]))]), batch["y"])


class ReadsFields(models.MLP):
    def loss(self, batch: Any) -> Tensor:
        assert batch.size == len(batch.inputs.names) == len(batch.y)
        return super().loss({"x": batch.inputs.x, "y": batch.y})


class Encoding(UserDict[str, Any]):
    """A mapping with attributes, as transformers' BatchEncoding."""

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("data", {}):
            return self.data[name]
        raise AttributeError(name)


class ReadsAttributes(models.MLP):
    def loss(self, batch: Any) -> Tensor:
        return super().loss({"x": batch.x, "y": batch.y})


class SlicedBatch(Mapping[str, Any]):
    """A mapping that slices itself and keeps its number of samples, as tensordict's `TensorDict`."""

    def __init__(self, items: Mapping[str, Tensor], batch_size: int) -> None:
        self._items, self.batch_size = dict(items), batch_size

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._items[key]
        items = {name: value[key] for name, value in self._items.items()}
        return SlicedBatch(items, len(items["y"]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def to(self, *_: Any, **__: Any) -> "SlicedBatch":
        return self


def as_sliced(batch: dict[str, Tensor]) -> SlicedBatch:
    return SlicedBatch(batch, len(batch["y"]))


class ReadsBatchSize(models.MLP):
    def loss(self, batch: Any) -> Tensor:
        assert batch.batch_size == len(batch["y"])
        return super().loss(batch)


# batches that steps change


def with_meta(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {**batch, "meta": {"scale": 0.5}, "table": torch.ones(1, WIDTH, dtype=torch.float64)}


class ChangesBatch(models.MLP):
    """Changes tensors in place and takes items out; a hook reads the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, float] = {}

    def loss(self, batch: Any) -> Tensor:
        scale = batch["meta"].pop("scale")
        batch["x"].mul_(scale).sub_(1)
        batch["y"][batch["y"] == 1] = 0
        return super().loss({"x": batch["x"], "y": batch.pop("y")})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen[f"x of batch {batch_idx}"] = float(batch["x"].sum())


class ChangesTable(models.MLP):
    """Changes in place what all samples share."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss({"x": batch["x"] * batch["table"].mul_(0.5), "y": batch["y"]})


class SetsItem(models.MLP):
    """The step sets an item of its batch anew, and a hook reads it."""

    def loss(self, batch: Any) -> Tensor:
        batch["x"] = batch["x"] * 0.5
        return super().loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.largest = float(batch["x"].max())


class ReadsAtStart(models.MLP):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.num_samples = len(batch["y"])


CHANGED_IN_PLACE = Habit(
    "a batch changed in place in the step, and read in `on_train_batch_end`", ChangesBatch,
    partial(converted, with_meta), everywhere(EXACT), always_exact=True,
)  # fmt: skip


# tensors for all samples


class Weighted(models.MLP):
    """Reads what is the same for all samples: weights of the features, a factor, an offset with one row."""

    def loss(self, batch: Any) -> Tensor:
        x = batch["x"]
        for name in ("weights", "offset", "factor"):
            x = x * (1 + batch.get(name, torch.zeros((), dtype=x.dtype)))
        return super().loss({"x": x, "y": batch["y"]})


def with_weights(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"weights": torch.arange(WIDTH, dtype=torch.float64) / WIDTH}


def with_constants(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    offset = torch.linspace(0, 1, WIDTH, dtype=torch.float64)[None]
    return batch | {"offset": offset, "factor": torch.tensor(0.5, dtype=torch.float64)}


# sequence-first


def sequence_first() -> list[Any]:
    """x [seq, batch, h], y [batch], and the mask of padding [batch, seq]."""
    positions = torch.arange(LENGTH)
    return [
        {"x": batch["x"].transpose(0, 1), "padding": positions >= batch["lengths"][:, None], "y": batch["y"]}
        for batch in sequences()
    ]


class SequenceFirst(models.MLP):
    """The mean over the positions, behind the stack."""

    def loss(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch["x"]).mean(0), batch["y"])


class TwoViews(models.Trained):
    """Two views of each sample go through the stack in one tensor: twice as many rows as samples."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, models.NUM_BLOCKS, enable_nested_tensor=False)

    def loss(self, batch: Any) -> Tensor:
        first, second = self.encoder(torch.cat([batch["x"], batch["x"].flip(1)])).mean(1).chunk(2)
        return (first - second).square().mean()


class SequenceFirstEncoder(models.Trained):
    """PyTorch's own encoder with batch_first=False."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=False)
        self.encoder = nn.TransformerEncoder(layer, models.NUM_BLOCKS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, batch: Any) -> Tensor:
        made = self.encoder(batch["x"], src_key_padding_mask=batch["padding"])
        return functional.cross_entropy(self.head(made[0]), batch["y"])


# the user's own function


def graphs() -> list[Any]:
    """Graphs of different sizes in one tensor of nodes, with the graph of each node."""
    return [
        {
            "nodes": torch.cat([x[:n] for x, n in zip(batch["x"], batch["lengths"], strict=True)]),
            "graph": torch.repeat_interleave(torch.arange(len(batch["y"])), batch["lengths"]),
            "y": batch["y"],
        }
        for batch in sequences()
    ]


def split_graphs(batch: dict[str, Tensor], n: int) -> list[dict[str, Tensor]]:
    """At most n batches of whole graphs."""
    parts = []
    for graphs in torch.arange(len(batch["y"])).tensor_split(min(n, len(batch["y"]))):
        rows = torch.isin(batch["graph"], graphs)
        parts.append(
            {"nodes": batch["nodes"][rows], "graph": batch["graph"][rows] - graphs[0], "y": batch["y"][graphs]}
        )
    return parts


def num_graphs(batch: dict[str, Tensor]) -> int:
    return len(batch["y"])


class GraphNetwork(models.MLP):
    """All nodes go through the stack; the mean over those of a graph is classified."""

    def loss(self, batch: Any) -> Tensor:
        count = len(batch["y"])
        sums = torch.zeros(count, CLASSES, dtype=torch.float64).index_add(0, batch["graph"], self(batch["nodes"]))
        sizes = torch.bincount(batch["graph"], minlength=count)
        return functional.cross_entropy(sums / sizes[:, None], batch["y"])


# labels of causal models


class ShiftedLabels(models.Trained):
    """A mean over all labels but the first of each sequence, where they aren't -100."""

    def __init__(self) -> None:
        super().__init__()
        self.body = models.MLP()

    def loss(self, batch: Any) -> Tensor:
        scores = self.body(batch["x"])[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


def with_labels() -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    made = []
    for batch in sequences():
        labels = torch.randint(CLASSES, batch["x"].shape[:2], generator=generator)
        is_padding = torch.arange(LENGTH) >= batch["lengths"][:, None]
        made.append({"x": batch["x"], "labels": labels.masked_fill(is_padding, IGNORED)})
    return made


def exact(name: str, model: Any, batches: Any, **strategy: Any) -> Habit:
    """A habit that must be exact on all layouts."""
    return Habit(name, model, batches, everywhere(EXACT), always_exact=True, strategy=strategy)


HABITS = [
    exact("a dictionary of tensors", models.MLP, VECTORS),
    exact("a list of samples, each a dictionary", Stacks, partial(converted, samples)),
    exact("sequences of different lengths in a list", PoolsList, ragged_sequences),
    exact("`(pictures, targets)` with a list of targets, each with its own boxes", Detects, pictures_with_boxes),
    exact("several loaders with batches of different sizes", TwoLosses, two_loaders),
    exact("nested dataclasses, with fields of `__post_init__`", ReadsFields, partial(converted, as_dataclass)),
    exact("a `UserDict`, such as transformers' `BatchEncoding`", ReadsAttributes, partial(converted, Encoding)),
    exact("a mapping that slices itself, such as a `TensorDict`", ReadsBatchSize, partial(converted, as_sliced)),
    CHANGED_IN_PLACE,
    Habit("a tensor for all samples, changed in place in the step", ChangesTable, partial(converted, with_meta),
          everywhere(Refused(r"changes batch\['table'\] .*in place", "the step changes batch['table'] in place"))),
    Habit("an item of the batch set anew in the step, and read in `on_train_batch_end`", SetsItem, VECTORS,
          everywhere(Refused(r"reads batch\['x'\].*each step has set its own", "each step has set its own"))),
    Habit("`on_train_batch_start` reads the batch", ReadsAtStart, VECTORS, {
        **everywhere(Refused("reads the batch.*pipeline rank 0 alone has it", "pipeline rank 0 alone has it")),
        "cube": EXACT,
    }),
    exact("tensors without dimensions, or with one row for all samples", Weighted, partial(converted, with_constants)),
    exact(
        "a tensor for all samples, with `whole=('weights',)`", Weighted, partial(converted, with_weights),
        whole=("weights",),
    ),
    Habit(
        "a tensor for all samples, without `whole`", Weighted, partial(converted, with_weights),
        everywhere(Refused(r"HanayoStrategy\(whole=\('weights',\)\)", "Use HanayoStrategy(whole=('weights',))")),
    ),
    exact("sequence-first tensors, with `batch_dim=1`", SequenceFirst, sequence_first, batch_dim=1),
    exact("the same in `nn.TransformerEncoder`, with a mask", SequenceFirstEncoder, sequence_first, batch_dim=1),
    Habit(
        "sequence-first tensors, without `batch_dim`", SequenceFirst, sequence_first,
        everywhere(Refused(r"different numbers of rows.*batch_dim=1", "different numbers of rows ... batch_dim=1")),
    ),
    exact("two views of each sample in one call of `nn.TransformerEncoder`", TwoViews, sequences),
    exact(
        "graphs in one tensor of nodes, with `split_batch` and `loss_weight`", GraphNetwork, graphs,
        split_batch=split_graphs, loss_weight=num_graphs,
    ),
    Habit(
        "graphs in one tensor of nodes, without `split_batch`", GraphNetwork, graphs,
        everywhere(Refused(r"different numbers of rows.*split_batch", "different numbers of rows ... split_batch")),
    ),
    exact("labels that the model shifts, with `loss_weight='shifted_tokens'`", ShiftedLabels, with_labels,
          loss_weight="shifted_tokens"),
]  # fmt: skip

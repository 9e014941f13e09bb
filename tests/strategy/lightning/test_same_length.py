"""All data ranks train as many batches as the one with the fewest, and say which one that is.

data rank 0    b0  b1  b2  b3  b4
data rank 1    b0  b1  b2
both           b0  b1  b2  end, b0  b1  b2  end
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, IterableDataset, Sampler

from tests.harness import models
from tests.harness.models import Batch
from tests.harness.pool import Pool
from tests.harness.training import Layout, make_trainer

DATA = Layout(pipe=1, data=2)
BOTH = Layout(pipe=2, data=2)
CUBE = Layout(pipe=1, data=2, cube=(1, 2, 1))
LENGTHS = (5, 3)


class Stream(IterableDataset[Batch]):
    """Ends without having said when."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        yield from self.batches


class Own(Sampler[int]):
    """A sampler of the user's: its length is not taken for certain."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield from range(self.length)


class Resumable(DataLoader[Batch]):
    """Goes on where its state says."""

    begin = num_read = 0

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        begin, self.begin = self.begin, 0
        for self.num_read, batch in enumerate(list(super().__iter__())[begin:], start=begin + 1):
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"begin": self.num_read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["begin"]


def of_length(length: int) -> list[Batch]:
    return models.vectors((4,) * length, torch.float32)


LOADERS: dict[str, Callable[[int], Any]] = {
    "sized": lambda length: DataLoader(of_length(length), batch_size=None),  # type: ignore[arg-type]
    "a stream": lambda length: DataLoader(Stream(of_length(length)), batch_size=None),
    "with an own sampler": lambda length: DataLoader(of_length(length), batch_size=None, sampler=Own(length)),  # type: ignore[arg-type]
    "with a state": lambda length: Resumable(Stream(of_length(length)), batch_size=None),
    "sized on data rank 0 alone": lambda length: LOADERS["sized" if length == LENGTHS[0] else "a stream"](length),
    "two": lambda length: {"first": LOADERS["sized"](length), "second": LOADERS["a stream"](length + 1)},
}


class Model(models.MLP):
    """Takes batches of one loader, or of two."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch.get("first", batch), batch_idx)


@dataclass(frozen=True)
class Trained:
    """What one rank has trained."""

    batches: list[int]
    """in each epoch"""
    steps: int
    said: list[str]


def fit(layout: Layout, kind: str, lengths: tuple[int, ...], options: dict[str, Any]) -> Trained:
    batches: list[int] = []

    class Counting(Model):
        def on_train_epoch_start(self) -> None:
            batches.append(0)

        def on_train_batch_end(self, *_: Any) -> None:
            batches[-1] += 1

    trainer = make_trainer(layout, **{"max_epochs": 2} | options)
    own = LOADERS[kind](lengths[trainer.strategy.data_rank])  # type: ignore[attr-defined]
    loaders = CombinedLoader(own, "min_size") if kind == "two" else own
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(models.build(Counting, torch.float32), loaders)
    said = [str(one.message) for one in caught if "training batches in this epoch" in str(one.message)]
    return Trained(batches, trainer.global_step, said)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        (DATA, "sized"),
        (BOTH, "a stream"),
        *(
            pytest.param(layout, kind, marks=pytest.mark.thorough)
            for layout in (DATA, BOTH, CUBE)
            for kind in LOADERS
            if (layout, kind) not in ((DATA, "sized"), (BOTH, "a stream"))
        ),
    ],
)
def test_all_end_the_epoch_after_the_shortest(pool: Pool, layout: Layout, kind: str) -> None:
    first, *others = pool.run(layout.world_size, fit, layout, kind, LENGTHS, {})
    assert all(one.batches == [3, 3] and one.steps == 6 for one in (first, *others))
    assert all(text.startswith("Data rank 1 has 3 training batches") for text in first.said)
    assert first.said and not any(one.said for one in others)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sized", "a stream"])
@pytest.mark.parametrize(
    ("options", "batches", "steps"),
    [
        ({"accumulate_grad_batches": 2}, [3, 3], 4),
        ({"limit_train_batches": 2}, [2, 2], 4),
        ({"max_steps": 4}, [3, 1], 4),
    ],
)
def test_options_count_the_common_batches(
    pool: Pool, kind: str, options: dict[str, Any], batches: list[int], steps: int
) -> None:
    for one in pool.run(4, fit, BOTH, kind, LENGTHS, options):
        assert (one.batches, one.steps) == (batches, steps)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sized", "a stream"])
def test_a_data_rank_without_batches_ends_the_training_of_all(pool: Pool, kind: str) -> None:
    ranks = pool.run(4, fit, BOTH, kind, (5, 0), {"max_epochs": 1})
    assert all(sum(one.batches) == one.steps == 0 for one in ranks)
    assert ranks[0].said[0].startswith("Data rank 1 has 0 training batches")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", LOADERS)
def test_nothing_is_said_of_equal_lengths(pool: Pool, kind: str) -> None:
    for one in pool.run(2, fit, DATA, kind, (4, 4), {}):
        assert (one.batches, one.said) == ([4, 4], [])


def validate(layout: Layout, kind: str) -> tuple[int, float]:
    """How many batches this rank has validated, and the loss over all data ranks."""
    num_batches = 0

    class Validating(models.MLP):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            self.log("loss", self.loss(batch), sync_dist=True)

        def on_validation_batch_end(self, *_: Any) -> None:
            nonlocal num_batches
            num_batches += 1

    trainer = make_trainer(layout)
    own = LOADERS[kind](LENGTHS[trainer.strategy.data_rank])  # type: ignore[attr-defined]
    (metrics,) = trainer.validate(models.build(Validating, torch.float32), own, verbose=False)
    return num_batches, metrics["loss"]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["sized", "a stream", "with an own sampler"])
def test_evaluations_leave_nothing_out(pool: Pool, kind: str) -> None:
    (a, loss), (b, _), (c, other), (d, _) = pool.run(4, validate, BOTH, kind)
    assert (a, b, c, d) == (5, 5, 3, 3) and loss == other

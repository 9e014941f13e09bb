"""An optimizer step takes as many samples after a resume as before, or the resume is refused."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hanayo import HanayoStrategy
from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy.losses import SampleCount, StepSamples, accumulation

SAVED = StepSamples(8, 4, 1)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (StepSamples(8, 4, 1), 1),
        (StepSamples(8, 2, 1), 2),  # half the data ranks
        (StepSamples(4, 2, 1), 4),
        (StepSamples(16, 2, 1), 1),  # the user has doubled the batch: nothing is scaled
        (StepSamples(8, 2, 2), 2),  # the user has doubled the accumulation
    ],
)
def test_accumulation_keeps_the_samples_of_a_step(now: StepSamples, expected: int) -> None:
    assert accumulation(SAVED, now) == expected


@pytest.mark.parametrize(
    ("now", "way_out"),
    [
        (StepSamples(8, 2, 3), "accumulate_grad_batches=2"),  # the user wants 3
        (StepSamples(8, 3, 1), "another batch size or number of data ranks"),
        (StepSamples(64, 1, 1), "another batch size or number of data ranks"),
    ],
)
def test_what_cannot_be_kept_is_refused_with_the_way_out(now: StepSamples, way_out: str) -> None:
    with pytest.raises(HanayoError, match=f"{SAVED.total} samples.*Choose {way_out}") as caught:
        accumulation(SAVED, now)
    assert "load_anyway=('samples',)" in str(caught.value)


def test_an_accumulation_of_several_batches_can_become_one() -> None:
    assert accumulation(StepSamples(8, 2, 4), StepSamples(32, 2, 4)) == 1


def test_the_first_batch_is_checked_where_the_loader_does_not_say_its_size() -> None:
    count = SampleCount()
    count.expect(SAVED, StepSamples(0, 2, 1))
    with pytest.raises(HanayoError, match="accumulate_grad_batches=2"):
        count.note(8)
    count.expect(SAVED, StepSamples(0, 2, 1))
    count.note(16)


def test_batches_of_unequal_sizes_are_no_change() -> None:
    count = SampleCount()
    count.expect(SAVED, StepSamples(0, 4, 1))
    count.note(3)
    assert count.largest == 8


def test_the_largest_batch_is_known() -> None:
    count = SampleCount()
    for batch in (3, 8, 5):
        count.note(batch)
    assert count.largest == 8


@pytest.mark.parametrize("saved", [SAVED, StepSamples(0, 4, 1)])
def test_batches_that_can_not_be_counted_are_named(saved: StepSamples) -> None:
    count = SampleCount()
    with pytest.warns(UserWarning, match="4 data ranks x 1 accumulated batches then, 2 x 1 now"):
        count.expect(saved, StepSamples(0, 2, 1))
        count.note(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        count.note(0)


class Largest(Callback):
    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.found = trainer.strategy.session.samples.largest


class Shaped(LightningModule):
    """Its batches have the shapes that users give them."""

    def __init__(self, shape: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(3, 1), shape

    def train_dataloader(self) -> Any:
        batches: Any = [self.shape(torch.ones(samples, 3)) for samples in (6, 4)]
        return DataLoader(batches, batch_size=None, collate_fn=_as_it_is)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(2, 3)).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _as_it_is(batch: Any) -> Any:
    return batch


SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "a tensor": lambda x: x,
    "columns": lambda x: [x, x[:, 0]],
    "a mapping": lambda x: {"index": torch.tensor(3), "x": x, "name": ["a"] * len(x)},
    "samples": lambda x: [{"x": row, "boxes": torch.ones(int(i), 4)} for i, row in enumerate(x)],
    "words": lambda x: {"words": ["a"] * len(x)},
}


@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*batches run whole")
@pytest.mark.parametrize("num_microbatches", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_samples_are_counted_whether_the_batch_is_cut_or_not(shape: str, num_microbatches: int) -> None:
    largest = Largest()
    trainer = Trainer(
        accelerator="cpu", devices=1, strategy=HanayoStrategy(1, num_microbatches=num_microbatches), max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[largest],
    )  # fmt: skip
    trainer.fit(Shaped(SHAPES[shape]))
    assert largest.found == 6

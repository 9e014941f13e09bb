"""An optimizer step takes as many samples after a resume as before, or the resume is refused."""

import pytest

from lightning_hanayo.errors import HanayoError
from lightning_hanayo.strategy.losses.step_samples import SampleCount, StepSamples, accumulation

SAVED = StepSamples(8, 4, 1)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (StepSamples(8, 4, 1), 1),
        (StepSamples(8, 2, 1), 2),  # half the data ranks
        (StepSamples(4, 2, 1), 4),
        (StepSamples(16, 2, 1), 1),  # the user has doubled the batch: nothing is scaled
        (StepSamples(8, 2, 2), 2),  # the user has doubled the accumulation
        (StepSamples(0, 2, 1), 1),  # not known yet
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

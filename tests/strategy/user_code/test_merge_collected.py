"""What the steps of two micro-batches have left becomes what one step would have left."""

from typing import Any

import pytest
import torch

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.merge import PieceSizes
from lightning_hanayo.strategy.user_code.collected import MUTATED, CollectedMerge, Left

LIST = ("self", "outputs")
WEIGHTS = [0.6, 0.4]


def merge(lefts: list[Left], sizes: tuple[int, ...] = (3, 2), microbatches: tuple[int, ...] = (0, 1)) -> CollectedMerge:
    return CollectedMerge(lefts, microbatches, PieceSizes([sizes]), WEIGHTS, WEIGHTS)


def appended(first: list[Any], second: list[Any], means: tuple[Any, Any] = (0.5, 1.5)) -> tuple[list[Any], list[str]]:
    made = merge([Left({LIST: own}, means=[mean]) for own, mean in zip((first, second), means, strict=True)])
    return made.appended()[LIST], made.kept_apart


def test_tensors_with_an_entry_for_each_sample_are_concatenated() -> None:
    (one,), apart = appended([torch.arange(3)], [torch.arange(3, 5)])
    assert one.tolist() == [0, 1, 2, 3, 4] and not apart


def test_a_number_that_was_returned_is_a_mean() -> None:
    (one,), apart = appended([{"loss": torch.tensor(0.5)}], [{"loss": torch.tensor(1.5)}])
    assert one["loss"].item() == pytest.approx(0.9) and not apart
    assert appended([0.5], [1.5])[0] == [pytest.approx(0.9)]


def test_only_the_loss_has_the_weights_of_a_sum() -> None:
    lefts = [
        Left({LIST: [loss, accuracy]}, means=[loss, accuracy], loss=torch.tensor(loss))
        for loss, accuracy in ((3.5, 0.5), (5.5, 0.75))
    ]
    made = CollectedMerge(lefts, (0, 1), PieceSizes([(3, 2)]), [1.0, 1.0], WEIGHTS)
    assert made.appended()[LIST] == [9.0, pytest.approx(0.6)]


@pytest.mark.parametrize("values", [(0.5, 1.6), (2, 2), (torch.tensor(2), torch.tensor(4))])
def test_other_numbers_stay_one_for_each_micro_batch(values: tuple[Any, Any]) -> None:
    assert appended([values[0]], [values[1]]) == (list(values), ["self.outputs"])


def test_whole_numbers_are_no_means() -> None:
    assert appended([3.0], [1.0], means=(3.0, 1.0)) == ([3.0, 1.0], ["self.outputs"])


def test_one_item_for_each_sample() -> None:
    assert appended([7, 8, 9], [1, 2]) == ([7, 8, 9, 1, 2], [])


def assigned(*values: Any, sizes: tuple[int, int] = (3, 2), microbatches: tuple[int, int] = (0, 1)) -> tuple[Any, Any]:
    path = ("self", "last")
    made = merge([Left(assigned={path: value}, means=[0.5]) for value in values], sizes, microbatches)
    return made.assigned().get(path), made.kept_apart


def test_an_attribute_that_each_step_sets() -> None:
    assert assigned(torch.zeros(3, 2), torch.zeros(2, 2))[0].shape == (5, 2)
    assert assigned(1, 1) == (None, []), "stays as it is"
    assert assigned(2, 2, sizes=(2, 2)) == (None, ["self.last"]), "may count the samples"
    assert assigned(MUTATED, MUTATED) == (None, ["self.last"])


def test_in_a_cube_a_value_of_one_ranks_samples_cant_be_read() -> None:
    value, _ = assigned(4, 5, microbatches=(0, 0))
    with pytest.raises(UnsupportedError, match="reads self.last .*each rank of the cube runs it on its own samples"):
        value + 1


def test_what_a_collective_gave_to_all_ranks_of_a_cube_counts_once() -> None:
    gathered = [Left({LIST: [torch.ones(7, 2)]}, used_collectives=True) for _ in range(2)]
    assert len(merge(gathered, microbatches=(0, 0)).appended()[LIST]) == 1
    with pytest.raises(UnsupportedError, match="self.outputs: a step that calls a collective has collected the number"):
        merge([Left({LIST: [3]}, used_collectives=True) for _ in range(2)], microbatches=(0, 0)).appended()

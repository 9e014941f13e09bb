"""What stages make is noted as sums, which nobody reads until a NaN was found."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.pipeline_parallel.capture.forward_patch import patch_blocks
from lightning_hanayo.pipeline_parallel.nan import BEFORE_STACK, MadeValues, Place

NAN, INF = float("nan"), float("inf")


def made(value: float, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ones, of which the last is `value`, with a gradient."""
    tensor = torch.ones(shape or (4, 3), dtype=dtype)
    tensor.view(-1)[-1] = value
    return tensor.requires_grad_()


def note(values: MadeValues, *blocks: float, microbatch: int = 0) -> None:
    values.action = microbatch, 0, True
    for index, value in enumerate(blocks):
        values.note_block(index, made(value))


def test_places_are_told_whose_values_are_not_finite() -> None:
    values = MadeValues(is_watched=True)
    with values.batch(is_last=True):
        note(values, 1.0, NAN, -INF)
        values.action = 1, 2, False
        values.note_gradients(3, [made(1.0), made(NAN)])
        values.note_loss(1, made(INF, 1))
    assert values.take().nonfinite() == [
        (Place(0, 0, 0, "forward", 1), True),
        (Place(0, 0, 0, "forward", 2), False),
        (Place(0, 1, 2, "backward", 3), True),
        (Place(0, 1, 0, "loss"), False),
    ]
    assert values.take().nonfinite() == []


def test_batches_that_accumulate_are_told_apart_and_kept_in_one_tensor_each() -> None:
    values = MadeValues(is_watched=True)
    for number, last in enumerate((1.0, 1.0, NAN)):
        with values.batch(is_last=number == 2):
            note(values, 1.0, 1.0, last)
    noted = values.take()
    assert [sums.numel() for sums in noted.sums] == [6, 1, 1, 1]
    assert noted.nonfinite() == [(Place(2, 0, 0, "forward", 2), True)]


def test_a_batch_whose_step_the_user_leaves_out_is_forgotten() -> None:
    values = MadeValues(is_watched=True)
    for bad in (0, 1):
        with values.batch(is_last=True):
            note(values, *(NAN if block == bad else 1.0 for block in range(2)))
    assert values.take().nonfinite() == [(Place(0, 0, 0, "forward", 1), True)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sums_of_finite_values_are_finite(dtype: torch.dtype) -> None:
    values = MadeValues(is_watched=True)
    with values.batch(is_last=True):
        values.action = 0, 0, True
        values.note_block(0, made(6e4, 40, 50, dtype=dtype))
        values.note_block(1, torch.full((9,), 6e4, dtype=dtype).requires_grad_())
    assert values.take().nonfinite() == []


def test_only_what_has_a_gradient_is_noted_of_blocks() -> None:
    values = MadeValues(is_watched=True)
    with values.batch(is_last=True):
        values.action = 0, 0, True
        values.note_block(0, {"x": (made(1.0), "text"), "mask": torch.full((2,), -INF)})
    assert len(values.take().sums) == 1


def test_of_a_frozen_block_nan_is_noted_but_not_a_mask_or_the_input() -> None:
    values = MadeValues(is_watched=True)
    with values.batch(is_last=True):
        values.action = 0, 0, True
        mask, ids = torch.full((2,), -INF), torch.ones(3, dtype=torch.int64)
        values.note_call(0, (made(NAN).detach(),), (made(1.0).detach(), mask, ids))
        values.note_block(1, (made(NAN).detach(), mask, ids))
    assert values.take().nonfinite() == [(Place(0, 0, 0, "forward", 1), True)]


def test_either_half_of_complex_values_counts() -> None:
    values = MadeValues(is_watched=True)
    with values.batch(is_last=True):
        values.action = 0, 0, True
        for index, value in enumerate((1j, complex(1, NAN), complex(INF, 1))):
            values.note_block(index, torch.tensor([value]).requires_grad_())
    assert [(place.index, is_nan) for place, is_nan in values.take().nonfinite()] == [(1, True), (2, False)]


def test_nothing_is_noted_outside_training_in_a_recomputation_or_unwatched() -> None:
    for values in (MadeValues(is_watched=True), MadeValues()):
        note(values, NAN)
        assert not values.take().sums
    values, unwatched = MadeValues(is_watched=True), MadeValues()
    with values.batch(is_last=True), unwatched.batch(is_last=True):
        values.action = 0, 0, False  # activation checkpoints run the block again
        values.note_block(0, made(NAN))
        note(unwatched, NAN)
    assert not values.take().sums and not unwatched.take().sums


def test_the_first_block_notes_its_input() -> None:
    values = MadeValues(is_watched=True)
    with values.batch(is_last=True):
        values.action = 0, 0, True
        values.note_call(0, ((made(NAN),), {"mask": None}), made(NAN))
        values.note_call(1, ((made(NAN),), {}), made(1.0))
    assert [place.index for place, _ in values.take().nonfinite()] == [BEFORE_STACK, 0]


def test_copies_of_a_block_note_nothing() -> None:
    values, block = MadeValues(is_watched=True), nn.Linear(2, 2)
    patch_blocks([block], values=values)
    with values.batch(is_last=True):
        values.action = 0, 0, True
        for copied in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
            copied(torch.ones(2))
        assert not values.take().sums


def test_with_anomaly_mode_a_nan_is_told_at_once() -> None:
    found: list[Place] = []
    values = MadeValues(on_nan=found.append)
    with torch.autograd.set_detect_anomaly(True), values.batch(is_last=True):
        values.action = 2, 0, True
        values.note_block(4, made(INF))
        values.note_block(5, made(NAN))
    assert found == [Place(0, 2, 0, "forward", 5)]

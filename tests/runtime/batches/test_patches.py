"""Patches of all samples' images in one tensor are cut by the samples' image tokens.

types [3, 7]     . 1 1 1 1 . 1      . . . . . . .      . 1 1 . . . .
grids            4 x 4 and 2 x 2    none               2 x 4
patches          0 to 19            none               20 to 27
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hanayo.errors import UnsupportedError
from lightning_hanayo.pipeline_parallel.batches.microbatches import BatchPlan, BatchRule, BatchSource
from lightning_hanayo.pipeline_parallel.batches.reader import BatchReader

TYPES = torch.tensor([[0, 1, 1, 1, 1, 0, 1], [0] * 7, [0, 1, 1, 0, 0, 0, 0]])
GRIDS = torch.tensor([[1, 4, 4], [1, 2, 2], [1, 2, 4]])


def images(types: Tensor = TYPES) -> dict[str, Any]:
    patches = torch.arange(28.0)[:, None]
    return {"pixel_values": patches, "image_grid_thw": GRIDS, "mm_token_type_ids": types, "y": torch.arange(3)}


def plan(batch: Any, rule: BatchRule = BatchRule(), **source: Any) -> BatchPlan:  # noqa: B008
    return BatchReader(rule).plan(batch, BatchSource(**source))


def test_patches_and_grids_go_with_their_samples() -> None:
    batch = images()
    of = plan(batch)
    assert of.part_sizes == (3,)
    first, last = of.select(batch, [range(2)]), of.select(batch, [range(2, 3)])
    assert first["pixel_values"].flatten().tolist() == list(range(20)) and first["y"].tolist() == [0, 1]
    assert last["pixel_values"].flatten().tolist() == list(range(20, 28))
    assert last["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert first["pixel_values"].data_ptr() == batch["pixel_values"].data_ptr(), "a view"
    assert of.select(batch, [[2, 0]])["image_grid_thw"].tolist() == GRIDS[[2, 0, 1]].tolist()


def test_a_micro_batch_without_images_gets_none() -> None:
    batch = ({"inputs": images()}, torch.arange(3))
    middle = plan(batch).select(batch, [range(1, 2)])[0]["inputs"]
    assert middle["pixel_values"] is None and middle["image_grid_thw"] is None and middle["y"].tolist() == [1]


def test_videos_are_cut_apart_from_images() -> None:
    """The second sample has a video of 8 patches, and the third one of 4."""
    types = TYPES.clone()
    types[1, 2:6], types[2, 5:] = 2, 2
    batch = images(types) | {
        "pixel_values_videos": torch.arange(12.0)[:, None],
        "video_grid_thw": torch.tensor([[2, 2, 2], [1, 2, 2]]),
        "second_per_grid_ts": [0.5, 2.0],
    }
    last = plan(batch).select(batch, [range(2, 3)])
    assert last["pixel_values_videos"].flatten().tolist() == [8, 9, 10, 11] and last["second_per_grid_ts"] == [2.0]
    assert last["pixel_values"].flatten().tolist() == list(range(20, 28))


def test_as_many_patches_as_samples_are_not_taken_for_their_rows() -> None:
    batch = {
        "pixel_values": torch.arange(4.0)[:, None],
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "mm_token_type_ids": torch.tensor([[0, 0], [0, 1], [0, 0], [0, 0]]),
    }
    assert plan(batch).select(batch, [range(2)])["pixel_values"].flatten().tolist() == [0, 1, 2, 3]


def test_the_config_names_the_token() -> None:
    module = nn.Sequential(nn.Linear(1, 1))
    module[0].config = SimpleNamespace(image_token_id=7)
    batch = images() | {"input_ids": TYPES.T * 7}
    del batch["mm_token_type_ids"]
    made = plan(batch, BatchRule(batch_dim=1), module=module).select(batch, [range(2, 3)])
    assert made["pixel_values"].flatten().tolist() == list(range(20, 28)) and made["input_ids"].shape == (7, 1)
    with pytest.raises(UnsupportedError, match=r"no mm_token_type_ids, and no model's config has image_token_id"):
        plan(batch)


def test_pictures_padded_to_one_number_of_patches_are_rows() -> None:
    batch = images() | {"pixel_values": torch.zeros(3, 16, 2)}
    assert plan(batch).select(batch, [range(1, 2)])["pixel_values"].shape == (1, 16, 2)


def test_samples_one_by_one_keep_their_own() -> None:
    batch = [
        {"pixel_values": torch.zeros(4 * n, 2), "image_grid_thw": torch.tensor([[1, 2, 2 * n]]), "input_ids": TYPES[n]}
        for n in (1, 2)
    ]
    assert plan(batch).part_sizes == (2,)


REFUSED = {
    (5, 0, 3): "of whole images: those of sample 0 end inside one",
    (3, 2, 2): "end inside one",
    (0, 0, 0): r"3 images, and the samples' 0 image tokens \(0, 0, 0\).*there are none",
}


@pytest.mark.parametrize("counts", REFUSED)
def test_tokens_that_are_not_those_of_whole_images_are_refused(counts: tuple[int, ...]) -> None:
    types = (torch.arange(7) < torch.tensor(counts)[:, None]).long()
    with pytest.raises(UnsupportedError, match=REFUSED[counts]):
        plan(images(types))

"""Habits: images of all samples in one tensor of patches, as processors of transformers make them.

sample 0   t I t I t t    two images of 4 and 8 patches, each of as many tokens as patches / 4
sample 1   t t t t t t    none
sample 2   t I I t t t    one image of 8 patches
"""

from functools import partial
from math import prod
from typing import Any

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from tests.habits.habit import EXACT, FP32_NORMS, Habit, Refused, everywhere
from tests.harness import models
from tests.harness.models import IGNORED, VOCABULARY, WIDTH

IMAGE, VIDEO, START = VOCABULARY - 1, VOCABULARY - 2, VOCABULARY - 3
PATCH = 3 * 2 * 2 * 2
"""values of a patch: colours, frames, height and width"""
GRIDS = {"I": (1, 2, 2), "J": (1, 2, 4), "V": (2, 2, 2)}
"""of two images and a video, in patches"""
SAMPLES = ("I.J.", ".", ".J", "IJI", "..I", "VJ", ".V.V", "J.")


def texts_with_images(kinds: str = "IJV", *, with_types: bool = True) -> list[dict[str, Any]]:
    """Batches of 8, 8 and 5 samples, with the images and videos of these kinds."""
    random = torch.Generator().manual_seed(6)
    return [_batch(samples, kinds, random, with_types) for samples in (SAMPLES, SAMPLES[::-1], SAMPLES[3:])]


def _batch(samples: tuple[str, ...], kinds: str, random: torch.Generator, with_types: bool) -> dict[str, Any]:
    rows: list[Tensor] = []
    grids: dict[int, list[tuple[int, ...]]] = {IMAGE: [], VIDEO: []}
    for sample in samples:
        tokens = torch.randint(1, START, (3,), generator=random).tolist()
        for part in sample:
            if part in kinds:
                token = VIDEO if part == "V" else IMAGE
                grids[token].append(GRIDS[part])
                tokens += [START, *[token] * (prod(GRIDS[part]) // 4)]
            tokens += torch.randint(1, START, (1,), generator=random).tolist()
        rows.append(torch.tensor(tokens))
    ids = pad_sequence(rows, batch_first=True)
    labels = ids.masked_fill((ids == 0) | (ids >= START), IGNORED)
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}
    if with_types:
        batch["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    for token, patches, key in ((IMAGE, "pixel_values", "image"), (VIDEO, "pixel_values_videos", "video")):
        if grids[token]:
            batch[f"{key}_grid_thw"] = torch.tensor(grids[token])
            shape = (sum(map(prod, grids[token])), PATCH)
            batch[patches] = torch.randn(shape, generator=random, dtype=torch.float64)
    return batch


class SeesImages(models.MLP):
    """Puts the features of images in the place of their tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.vision = nn.Sequential(nn.Linear(4 * PATCH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.out = nn.Linear(models.CLASSES, VOCABULARY)

    def loss(self, batch: Any) -> Tensor:
        x = self.tokens(batch["input_ids"])
        if batch.get("pixel_values") is not None:
            assert len(batch["pixel_values"]) == batch["image_grid_thw"].prod(1).sum()
            is_image = (batch["input_ids"] == IMAGE)[..., None].expand_as(x)
            x = x.masked_scatter(is_image, self.vision(batch["pixel_values"].reshape(-1, 4 * PATCH)))
        scores = self.out(self(x))[:, :-1]
        return functional.cross_entropy(scores.flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)


class NamesToken(SeesImages):
    """Its config, as that of a model of transformers, says which token is an image's."""

    class config:
        image_token_id = IMAGE


class TransformersLoss(models.Trained):
    """An unmodified model of transformers with a loss in fp64: its own is computed in fp32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, batch: Any) -> Tensor:
        labels = batch["labels"]
        scores = self.model(**{key: value for key, value in batch.items() if key != "labels"}, use_cache=False).logits
        return functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)


def qwen2_vl(vision_width: int = WIDTH) -> LightningModule:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 8,
            "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
            "bos_token_id": 0, "eos_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            "depth": 2, "embed_dim": vision_width, "hidden_size": WIDTH, "num_heads": 2, "mlp_ratio": 2,
            "patch_size": 2, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
        },
        image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START,
    )  # fmt: skip
    return TransformersLoss(Qwen2VLForConditionalGeneration(config))


HABITS = [
    Habit(
        "images in one tensor of patches, with `mm_token_type_ids`", SeesImages, partial(texts_with_images, "IJ"),
        everywhere(EXACT), always_exact=True,
    ),
    Habit(
        "the same without them, with a config that names the image token", NamesToken,
        partial(texts_with_images, "IJ", with_types=False), everywhere(EXACT), always_exact=True,
    ),
    Habit(
        "the same without either", SeesImages, partial(texts_with_images, "IJ", with_types=False),
        everywhere(Refused("no mm_token_type_ids, and no model's config has image_token_id")),
    ),
    Habit(
        "Qwen2-VL with images and videos", qwen2_vl, texts_with_images, everywhere(EXACT), always_exact=True,
        tolerance=FP32_NORMS,
    ),
]  # fmt: skip

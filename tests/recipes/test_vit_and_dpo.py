"""The recipes ViT and DPO train over a wave and a cube as in one process; their data are what they say."""

from functools import partial

import pytest
import torch
from lightning import LightningModule
from torch import Tensor

from recipes.dpo.data import CountingPairs, PairData
from recipes.dpo.module import DPO
from recipes.vit.data import SHAPES, ShapeData, Shapes
from recipes.vit.module import ViT
from tests.harness.oracle import plain
from tests.harness.pool import Pool
from tests.harness.thorough import covered
from tests.harness.training import Layout, Training, assert_close, run

LAYOUTS = [Layout(2, 2, 1), Layout(1, 1, 1, cube=(1, 2, 1))]
SAMPLES, STEPS = 8, 2


class SmallViT(ViT):
    """Takes its batches as dictionaries."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        return super().training_step((batch["images"], batch["labels"]), batch_idx)


def vit() -> LightningModule:
    return SmallViT(image_size=8, num_layers=8, width=16, num_heads=2, warmup_steps=0)


def dpo() -> LightningModule:
    return DPO(rank=2, vocab_size=16, context=8, num_layers=8, width=16, num_heads=2, learning_rate=1e-2)


def images() -> list[dict[str, Tensor]]:
    drawn = [Shapes(SAMPLES * STEPS, 8, seed=1)[index] for index in range(SAMPLES * STEPS)]
    names = {"images": 0, "labels": 1}
    stacked = {name: torch.stack([one[place] for one in drawn]) for name, place in names.items()}
    return [{name: value.chunk(STEPS)[step] for name, value in stacked.items()} for step in range(STEPS)]


def pairs() -> list[dict[str, Tensor]]:
    made = [CountingPairs(SAMPLES * STEPS, 8, 16, seed=1)[index] for index in range(SAMPLES * STEPS)]
    stacked = {name: torch.stack([one[name] for one in made]) for name in made[0]}
    return [{name: value.chunk(STEPS)[step] for name, value in stacked.items()} for step in range(STEPS)]


@pytest.mark.parametrize("layout", covered(LAYOUTS, by=LAYOUTS[:1]), ids=str)
@pytest.mark.parametrize(("model", "batches"), [(vit, images), (dpo, pairs)], ids=["vit", "dpo"])
def test_it_trains_as_in_one_process(pool: Pool, model: partial, batches: partial, layout: Layout) -> None:
    training = Training(model, batches, torch.float64, steps=STEPS, clip=1.0)
    assert_close(run(pool, training, layout).weights, plain(pool, training).weights, 1e-10)


def test_images_are_the_same_each_time_and_their_shapes_differ() -> None:
    data = ShapeData(num_train=64, num_val=8)
    images, labels = zip(*(data.train[index] for index in range(64)), strict=True)
    again, _ = Shapes(64, 32, seed=1)[5]
    assert torch.equal(images[5], again) and not torch.equal(images[5], data.val[5][0])
    assert {int(label) for label in labels} == set(range(len(SHAPES)))
    areas = [float((image > 0.45).all(0).float().mean()) for image in images]
    assert all(0.005 < area < 0.35 for area in areas), "there is a shape in each image"


def test_answers_count_on() -> None:
    pair = PairData().train[3]
    chosen, rejected, is_answer = (pair[name] for name in ("chosen", "rejected", "is_answer"))
    assert torch.equal(chosen[~is_answer], rejected[~is_answer]) and is_answer.any()
    ahead, back = (row.diff()[is_answer[1:]] % 64 for row in (chosen, rejected))
    assert (ahead == 1).all() and (back == 63).all()


def test_the_policy_begins_as_the_reference_and_moves_away() -> None:
    torch.manual_seed(0)
    module = DPO(rank=2, vocab_size=16, context=8, num_layers=2, width=16, num_heads=2)
    batch = pairs()[0]
    assert module._margin(batch).abs().max() < 1e-6
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        (-torch.nn.functional.logsigmoid(0.1 * module._margin(batch))).mean().backward()
        optimizer.step()
    assert module._margin(batch).mean() > 0.1

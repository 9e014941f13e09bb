"""A model that is built of 3-D layers trains on several ranks as on one."""

import pytest
import torch

from lightning_hanayo.tensor_parallel import Mesh, StageContext
from recipes.cube.model import Kind, LanguageModel, train
from tests.harness.mesh import Sizes, make_mesh, process_group
from tests.harness.pool import Pool


def losses(mesh: Mesh, kind: Kind) -> list[float]:
    """Three steps in double precision."""
    torch.manual_seed(0)
    model = LanguageModel(13, 8, 4, 2, kind=kind, context=StageContext(mesh)).double()
    ids = torch.randint(13, (4, 6))
    return train(model, ids, ids.roll(-1, 1), num_steps=3)


def losses_on(sizes: Sizes) -> dict[Kind, list[float]]:
    with process_group():
        mesh = make_mesh(sizes)
        return {"gpt": losses(mesh, "gpt"), "llama": losses(mesh, "llama")}


@pytest.mark.parametrize("sizes", [(1, 2, 2), pytest.param((2, 1, 2), marks=pytest.mark.thorough)], ids=str)
def test_trains_as_on_one_rank(pool: Pool, sizes: Sizes) -> None:
    expected = {"gpt": losses(Mesh.single(), "gpt"), "llama": losses(Mesh.single(), "llama")}
    assert all(alone[2] < alone[0] for alone in expected.values())
    for rank in pool.run(4, losses_on, sizes):
        for kind, alone in expected.items():
            assert rank[kind] == pytest.approx(alone, rel=1e-9)

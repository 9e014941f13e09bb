"""3-D dropout: a mask for each rank, the same when it is recomputed, and generators that stay equal."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_hanayo.tensor_parallel.layers.norm import Dropout3D, parallelize_dropout, rank_random_stream
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.mesh import make_mesh, process_group
from tests.harness.pool import Pool


def dropped() -> dict[str, Any]:
    """One rank's masks, and the state of its default generator after them."""
    with process_group():
        context = StageContext(make_mesh((1, 2, 2)))
        torch.manual_seed(0)
        silent(context)
        dropout = nn.Dropout(0.25)
        parallelize_dropout(dropout, context)
        masks = [dropout(torch.ones(4096)) for _ in range(2)]
        assert isinstance(dropout, Dropout3D)
        for reentrant in (False, True):
            recomputed(dropout, reentrant)
        with rank_random_stream(context, torch.device("cpu")):
            own = torch.rand(4)
        return {"masks": masks, "own": own, "after": torch.get_rng_state()}


def silent(context: StageContext) -> None:
    """Nothing is drawn where nothing is dropped."""
    before, x = torch.get_rng_state(), torch.ones(3)
    assert torch.equal(Dropout3D(0.0, context=context)(x), x)
    assert torch.equal(Dropout3D(0.5, context=context).eval()(x), x)
    assert torch.equal(torch.get_rng_state(), before)


def recomputed(dropout: nn.Module, reentrant: bool) -> None:
    """A mask made again for the backward is the forward's: the gradient of dropout(x) * dropout(x) tells."""
    x = torch.ones(512, requires_grad=True)

    def twice(x: Tensor) -> Tensor:
        return dropout(x) * (1 + dropout(x))

    y = checkpoint(twice, x, use_reentrant=reentrant)
    assert isinstance(y, Tensor)
    y.sum().backward()
    first = (y > 0).float() / 0.75  # y = a (1 + b), so dy/dx = a (1 + b) + a b = 2 y - a
    assert x.grad is not None and torch.allclose(x.grad, 2 * y - first)


def test_masks_differ_and_generators_stay_equal(pool: Pool) -> None:
    ranks = pool.run(4, dropped)
    masks = [mask for rank in ranks for mask in rank["masks"]]
    assert len({tuple(mask.tolist()) for mask in masks}) == 8
    assert len({tuple(rank["own"].tolist()) for rank in ranks}) == 4
    for mask in masks:
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
        assert abs((mask == 0).float().mean() - 0.25) < 0.03
    together = torch.stack([mask == 0 for mask in masks]).float()
    assert together.cov().fill_diagonal_(0).abs().max() < 0.02
    assert all(torch.equal(rank["after"], ranks[0]["after"]) for rank in ranks)


def alone() -> None:
    with process_group():
        context = StageContext(make_mesh((1, 1, 1)))
        torch.manual_seed(0)
        y = Dropout3D(0.5, context=context)(torch.ones(64))
        torch.manual_seed(0)
        assert torch.equal(y, nn.Dropout(0.5)(torch.ones(64)))


def test_one_rank_drops_as_torch_does(pool: Pool) -> None:
    pool.run(1, alone)

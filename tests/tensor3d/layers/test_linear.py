"""Linear layers over the grid: output and gradients are the dense layer's parts, on every grid and in both layouts."""

from itertools import groupby, product
from math import prod

import pytest
import torch
from torch import nn

from lightning_hanayo.tensor3d.layers.linear import Linear3D
from lightning_hanayo.tensor3d.layers.product import Keep
from lightning_hanayo.tensor3d.mesh import Mesh
from lightning_hanayo.tensor3d.parallel_style import BATCH, SEQUENCE
from lightning_hanayo.tensor3d.stage_context import StageContext
from tests.harness.mesh import MESH_SIZES, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool

LAYOUTS = {
    "sequence": (SEQUENCE, ("x", "y", "z"), ("x", "", "yz")),
    "batch": (BATCH, ("xy", "", "z"), ("xz", "", "y")),
}


def pair(ranks: Mesh, kind: str, keep: Keep, dtype: torch.dtype) -> dict[str, float]:
    """Two layers one after the other, the second swapped: errors of everything against the dense ones."""
    torch.manual_seed(0)
    team = StageContext(ranks, keep, num_pieces=1 if dtype is torch.float32 else 3 if keep == "shards" else 2)
    layout, outer, _ = LAYOUTS[kind]
    up, down = nn.Linear(12, 24, dtype=dtype), nn.Linear(24, 12, dtype=dtype)
    torch.manual_seed(0)
    up3 = Linear3D(12, 24, setting=team, layout=layout, dtype=dtype)
    down3 = Linear3D(24, 12, setting=team, layout=layout.swapped(), dtype=dtype)
    x = torch.randn(12, 12, 12, dtype=dtype)
    own = part(x, team.grid, *outer).requires_grad_()
    x.requires_grad_()
    y, own_y = down(torch.tanh(up(x))), down3(torch.tanh(up3(own)))
    gradient = torch.randn_like(y)
    y.backward(gradient)
    own_y.backward(part(gradient, team.grid, *outer))
    assert x.grad is not None and own_y.dtype is dtype
    errors = {"y": error(own_y, part(y.detach(), team.grid, *outer))}
    errors["dx"] = error(own.grad, part(x.grad, team.grid, *outer))
    for name, dense, spread in (("up", up, up3), ("down", down, down3)):
        for kind_of, shard in spread.shards.items():
            parameter, whole = spread._parameters[kind_of], dense._parameters[kind_of]
            assert parameter is not None and whole is not None and whole.grad is not None
            assert torch.equal(parameter.detach(), shard.of(whole.detach(), team.grid))
            gradient = parameter.grad
            if shard.partial and gradient is not None:
                gradient = team.grid.axis(shard.partial).all_reduce(gradient.clone()).wait()
            errors[f"{name}.{kind_of}"] = error(gradient, shard.of(whole.grad, team.grid))
            if kind_of == "weight":
                assert parameter.numel() * ranks.num_ranks == whole.numel()
    return errors


def pairs(grids: list[Sizes]) -> dict[str, float]:
    """In units of what is allowed."""
    errors = {}
    with process_group():
        for sizes in grids:
            ranks = make_mesh(sizes)
            for kind, keep, dtype in product(LAYOUTS, ("gathered", "shards"), (torch.float64, torch.float32)):
                allowed = 1e-10 if dtype is torch.float64 else 1e-5
                case = pair(ranks, kind, keep, dtype)
                errors |= {f"{sizes} {kind} {keep} {dtype} {what}": error / allowed for what, error in case.items()}
    return errors


BY_SIZE = [list(grids) for _, grids in groupby(sorted(MESH_SIZES, key=prod), key=prod)]


@pytest.mark.parametrize("grids", BY_SIZE, ids=lambda grids: f"{prod(grids[0])} ranks")
def test_equals_the_dense_layers(pool: Pool, grids: list[Sizes]) -> None:
    for errors in pool.run(prod(grids[0]), pairs, grids):
        assert {what: error for what, error in errors.items() if not error <= 1.0} == {}

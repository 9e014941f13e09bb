"""3-D linear layers: output and gradients are shards of those of torch's layers, on every mesh and in both styles."""

from itertools import groupby, product
from math import prod

import pytest
import torch
from torch import nn

from lightning_hanayo.tensor_parallel.layers.linear import Linear3D
from lightning_hanayo.tensor_parallel.mesh import Mesh
from lightning_hanayo.tensor_parallel.product import BATCH, SEQUENCE, Keep
from lightning_hanayo.tensor_parallel.sharding import shards_of
from lightning_hanayo.tensor_parallel.stage_context import StageContext
from tests.harness.mesh import MESH_SIZES, Sizes, error, make_mesh, part, process_group
from tests.harness.pool import Pool

STYLES = {
    "sequence": (SEQUENCE, ("x", "y", "z"), ("x", "", "yz")),
    "batch": (BATCH, ("xy", "", "z"), ("xz", "", "y")),
}


def pair(ranks: Mesh, kind: str, keep: Keep, dtype: torch.dtype) -> dict[str, float]:
    """A column-parallel and a row-parallel layer: errors of everything, compared with torch's layers."""
    torch.manual_seed(0)
    context = StageContext(ranks, keep, num_pieces=1 if dtype is torch.float32 else 3 if keep == "shards" else 2)
    style, outer, _ = STYLES[kind]
    up, down = nn.Linear(12, 24, dtype=dtype), nn.Linear(24, 12, dtype=dtype)
    torch.manual_seed(0)
    up3 = Linear3D(12, 24, context=context, style=style, dtype=dtype)
    down3 = Linear3D(24, 12, context=context, style=style.row_parallel(), dtype=dtype)
    x = torch.randn(12, 12, 12, dtype=dtype)
    own = part(x, context.mesh, *outer).requires_grad_()
    x.requires_grad_()
    y, own_y = down(torch.tanh(up(x))), down3(torch.tanh(up3(own)))
    gradient = torch.randn_like(y)
    y.backward(gradient)
    own_y.backward(part(gradient, context.mesh, *outer))
    assert x.grad is not None and own_y.dtype is dtype
    errors = {"y": error(own_y, part(y.detach(), context.mesh, *outer))}
    errors["dx"] = error(own.grad, part(x.grad, context.mesh, *outer))
    for name, reference, sharded in (("up", up, up3), ("down", down, down3)):
        for parameter_name, shard in shards_of(sharded).items():
            parameter, whole = sharded._parameters[parameter_name], reference._parameters[parameter_name]
            assert parameter is not None and whole is not None and whole.grad is not None
            assert torch.equal(parameter.detach(), shard.of(whole.detach(), context.mesh))
            gradient = parameter.grad
            if shard.partial and gradient is not None:
                gradient = context.mesh.axis(shard.partial).all_reduce(gradient.clone()).wait()
            errors[f"{name}.{parameter_name}"] = error(gradient, shard.of(whole.grad, context.mesh))
            if parameter_name == "weight":
                assert parameter.numel() * ranks.num_ranks == whole.numel()
    return errors


def pairs(meshes: list[Sizes]) -> dict[str, float]:
    """In units of what is allowed."""
    errors = {}
    with process_group():
        for sizes in meshes:
            ranks = make_mesh(sizes)
            for kind, keep, dtype in product(STYLES, ("gathered", "shards"), (torch.float64, torch.float32)):
                allowed = 1e-10 if dtype is torch.float64 else 1e-5
                case = pair(ranks, kind, keep, dtype)
                errors |= {f"{sizes} {kind} {keep} {dtype} {what}": error / allowed for what, error in case.items()}
    return errors


BY_SIZE = [list(meshes) for _, meshes in groupby(sorted(MESH_SIZES, key=prod), key=prod)]


@pytest.mark.parametrize("meshes", BY_SIZE, ids=lambda meshes: f"{prod(meshes[0])} ranks")
def test_equals_torchs_layers(pool: Pool, meshes: list[Sizes]) -> None:
    for errors in pool.run(prod(meshes[0]), pairs, meshes):
        assert {what: error for what, error in errors.items() if not error <= 1.0} == {}
